//! Initialisation, versions, errors and the look-up of functions.

use std::ffi::CStr;

use gshare_cuda_abi::{Resolution, resolve};

use super::*;
use crate::call_trace::{self, Found};
use crate::errors::{ERRORS, ErrorRow};

entry!(cuInit, |Flags| {
    invalid_if(Flags != 0)?;
    initialise()
});

entry!(cuDriverGetVersion, |driverVersion| put(driverVersion, driver_version() as c_int));

// Without the feature `runtime-tables`, and for an identifier that is not served: `CUDA_ERROR_NOT_FOUND` and null.
entry!(cuGetExportTable, |ppExportTable, pExportTableId| {
    invalid_if(pExportTableId.is_null())?;
    let id = pExportTableId.cast::<[u8; 16]>().read_unaligned();
    let (table, name) = private_table(&id);
    call_trace::table(id, name);
    put(ppExportTable, table.unwrap_or(std::ptr::null()))?;
    table.map(drop).ok_or(INVALID_VALUE)
});

#[cfg(feature = "runtime-tables")]
fn private_table(id: &[u8; 16]) -> (Option<*const c_void>, Option<&'static str>) {
    (crate::private_tables::find(id), crate::private_tables::name(id))
}

#[cfg(not(feature = "runtime-tables"))]
fn private_table(_id: &[u8; 16]) -> (Option<*const c_void>, Option<&'static str>) {
    (None, None)
}

unsafe fn look_up(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: c_int,
    flags: u64,
    symbolStatus: *mut c_uint,
) -> Answer {
    invalid_if(symbol.is_null() || pfn.is_null() || flags > 2)?;
    let Ok(asked) = u32::try_from(cudaVersion) else { return Err(INVALID_VALUE) };
    let name = CStr::from_ptr(symbol).to_str().map_err(|_| INVALID_VALUE)?;
    let release = asked.min(driver_version());
    let (pointer, status, found) = match resolve(name, release, flags) {
        Resolution::Found(symbol) => {
            let found = Found::Variant(symbol.name, is_served(symbol.name));
            (POINTERS[symbol.index].0.cast_mut().cast(), 0, found)
        }
        Resolution::UnknownName => (null_mut(), 1, Found::UnknownName),
        // A name that this driver is too old for is unknown to it.
        Resolution::TooNew => match resolve(name, driver_version(), flags) {
            Resolution::Found(_) => (null_mut(), 2, Found::TooNew),
            _ => (null_mut(), 1, Found::TooNewForDriver),
        },
    };
    call_trace::lookup(name, asked, flags, found);
    put(pfn, pointer)?;
    put_opt(symbolStatus, status);
    Ok(())
}

entry!(cuGetProcAddress, |symbol, pfn, version, flags| { look_up(symbol, pfn, version, flags, null_mut()) });

entry!(cuGetProcAddress_v2, |symbol, pfn, version, flags, status| {
    look_up(symbol, pfn, version, flags, status)
});

entry!(cuGetErrorName, |error, pStr| error_text(error, pStr, |row| row.1));
entry!(cuGetErrorString, |error, pStr| error_text(error, pStr, |row| row.2));

unsafe fn error_text(
    error: CUresult,
    to: *mut *const c_char,
    pick: fn(&ErrorRow) -> &'static CStr,
) -> Answer {
    match ERRORS.iter().find(|row| row.0 == error.0) {
        Some(row) => put(to, pick(row).as_ptr()),
        None => {
            put(to, std::ptr::null())?;
            Err(INVALID_VALUE)
        }
    }
}

entry!(cuProfilerStart | cuProfilerStop, || current().map(drop));
