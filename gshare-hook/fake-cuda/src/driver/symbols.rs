//! Initialisation, versions, errors and the look-up of functions.

use std::ffi::CStr;

use gshare_cuda_abi::{Resolution, resolve};

use super::*;
use crate::call_trace::{self, Found};
#[cfg(feature = "runtime-tables")]
use crate::private_tables::find as private_table;

entry!(cuInit, |Flags| {
    invalid_if(Flags != 0)?;
    initialise()
});

entry!(cuDriverGetVersion, |driverVersion| put(driverVersion, driver_version() as c_int));

// `CUDA_ERROR_NOT_FOUND` and null without the feature `runtime-tables`, and for an unknown identifier.
entry!(cuGetExportTable, |ppExportTable, pExportTableId| {
    let id: [u8; 16] = read(pExportTableId.cast())?;
    let table = private_table(&id);
    call_trace::table(&id, table.map(|(_, name)| name));
    put(ppExportTable, table.map_or(std::ptr::null(), |(words, _)| words))?;
    table.map(drop).ok_or(INVALID_VALUE)
});

#[cfg(not(feature = "runtime-tables"))]
fn private_table(_id: &[u8; 16]) -> Option<(*const c_void, &'static str)> {
    None
}

entry!(cuGetProcAddress_v2, |symbol, pfn, version, flags, status| {
    invalid_if(symbol.is_null() || pfn.is_null() || flags > 2)?;
    let Ok(asked) = u32::try_from(version) else { return Err(INVALID_VALUE) };
    let name = CStr::from_ptr(symbol).to_str().map_err(|_| INVALID_VALUE)?;
    let (pointer, code, found) = match resolve(name, asked.min(driver_version()), flags) {
        Resolution::Found(symbol) => {
            let found = Found::Variant(symbol.name, is_served(symbol.name));
            (POINTERS[symbol.index].0.cast_mut().cast(), 0, found)
        }
        Resolution::UnknownName => (null_mut(), 1, Found::UnknownName),
        // A name newer than this driver is unknown to it.
        Resolution::TooNew => match resolve(name, driver_version(), flags) {
            Resolution::Found(_) => (null_mut(), 2, Found::TooNew),
            _ => (null_mut(), 1, Found::TooNewForDriver),
        },
    };
    call_trace::lookup(name, asked, flags, found);
    put(pfn, pointer)?;
    put_opt(status, code);
});
alias!(
    cuGetProcAddress(symbol, pfn, version, flags) =
        cuGetProcAddress_v2(symbol, pfn, version, flags, null_mut())
);

entry!(cuGetErrorName, |error, pStr| put_error_text(pStr, error.texts().map(|texts| texts.0)));
entry!(cuGetErrorString, |error, pStr| put_error_text(pStr, error.texts().map(|texts| texts.1)));

unsafe fn put_error_text(to: *mut *const c_char, text: Option<&CStr>) -> Answer {
    put(to, text.map_or(std::ptr::null(), CStr::as_ptr))?;
    text.map(drop).ok_or(INVALID_VALUE)
}

entry!(cuProfilerStart | cuProfilerStop, || current().map(drop));
