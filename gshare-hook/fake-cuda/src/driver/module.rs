//! Modules, libraries, functions, kernels and launches.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::Mutex;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use super::core::*;
use super::graph::{Node, legacy_not_implied};
use super::*;
use crate::sim::Work;
use gshare_fake_cuda_spec::{Duration, Named, Profile};

/// Code: what is known about an image.
#[derive(Debug)]
struct Code {
    /// Kernel names, for PTX text; `None` for binary images, where any name is accepted.
    names: Option<Vec<String>>,
    /// Global variables of PTX text, with their sizes.
    globals: BTreeMap<String, u64>,
}

/// A module or a library (both hold code and give out functions).
#[derive(Debug)]
pub(crate) struct Module {
    code: Code,
    is_library: bool,
    functions: Mutex<BTreeMap<String, &'static Object<Function>>>,
    globals: Mutex<BTreeMap<String, (u64, u64)>>,
}

impl Kind for Module {
    const MAGIC: u64 = 0x6773_6861_7265_4d4f;
}

/// A function of a module, or a kernel of a library: the same object serves as `CUfunction` and `CUkernel`.
#[derive(Debug)]
pub(crate) struct Function {
    name: CString,
    module: &'static Object<Module>,
    pub(crate) named: Named,
    /// Whether every launch costs nothing.
    free: bool,
    shared_max: AtomicI32,
    carveout: AtomicI32,
    /// For cuFuncSetBlockShape and cuLaunch.
    block: Mutex<[u32; 3]>,
}

impl Kind for Function {
    const MAGIC: u64 = 0x6773_6861_7265_4655;
}

/// Of the calling thread's device, or of the GPU.
fn current_profile() -> Result<&'static Profile, CUresult> {
    let driver = driver()?;
    Ok(current_opt().map_or(driver.profile(), |context| driver.profile_of(context.gpu)))
}

/// One launch, priced.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) function: &'static Object<Function>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) first: Option<u64>,
    pub(crate) params: usize,
    pub(crate) extra: usize,
    pub(crate) cooperative: bool,
}

impl Launch {
    pub(crate) fn blocks(&self) -> u64 {
        self.grid.iter().map(|n| u64::from(*n)).fold(1, u64::saturating_mul)
    }

    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().fold(1_u32, |a, n| a.saturating_mul(*n))
    }

    /// Checks what the driver checks before it launches.
    pub(crate) fn check(&self) -> Answer {
        let [gx, gy, gz] = self.grid;
        let [bx, by, bz] = self.block;
        if gx == 0 || gy == 0 || gz == 0 || bx == 0 || by == 0 || bz == 0 {
            return Err(INVALID_VALUE);
        }
        if gx > 0x7fff_ffff
            || gy > 65_535
            || gz > 65_535
            || bx > 1024
            || by > 1024
            || bz > 64
            || self.threads() > 1024
        {
            return Err(INVALID_VALUE);
        }
        let profile = current_profile()?;
        if self.shared > profile.shared_memory_per_sm_bytes {
            return Err(INVALID_VALUE);
        }
        if self.cooperative {
            let fit = (profile.threads_per_sm / self.threads()).clamp(1, profile.blocks_per_sm);
            if self.blocks() > u64::from(fit) * u64::from(profile.sms) {
                return Err(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
            }
        }
        Ok(())
    }

    pub(crate) fn run(&self, stream: &'static Object<Stream>) -> Answer {
        let driver = driver()?;
        let (mut sms, mut ns) =
            driver.profile().cost(self.function.named, self.blocks(), self.threads(), self.first);
        let slice = driver.profile_of(stream.context.gpu).sms;
        if let Some(cap) = context_sms(stream).or(Some(slice)).filter(|cap| *cap < sms) {
            ns = u64::try_from((u128::from(ns) * u128::from(sms)).div_ceil(u128::from(cap.max(1))))
                .unwrap_or(ns);
            sms = cap.max(1);
        }
        push(stream, Work::Kernel { sms, ns })?;
        Ok(())
    }
}

/// First argument of a launch as a 64-bit integer, for kernels whose name says that it is their duration.
pub(crate) unsafe fn first_argument(
    function: &Function,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<u64> {
    if function.named.duration != Duration::FirstArgument {
        return None;
    }
    if !params.is_null() && !(*params).is_null() {
        return Some((*params).cast::<u64>().read_unaligned());
    }
    // CU_LAUNCH_PARAM_BUFFER_POINTER is 1; the list ends with 0.
    let mut at = extra;
    while !at.is_null() && !(*at).is_null() {
        if *at as usize == 1 {
            return Some((*at.add(1)).cast::<u64>().read_unaligned());
        }
        at = at.add(2);
    }
    None
}

/// The time of a launch call passes. Then a kernel that costs nothing on a stream with nothing pending is counted, and done.
#[inline]
unsafe fn launch_free(flavor: Flavor, f: sys::CUfunction, ok: bool, hStream: sys::CUstream) -> bool {
    calls::launch();
    match Object::<Function>::get(f) {
        Ok(function) if function.free && ok => count_if_idle(flavor, hStream),
        _ => false,
    }
}

/// This one has no guard: the free path has nothing that panics, and the rest brings its own.
#[inline(always)]
pub(super) unsafe fn cuLaunchKernel(
    flavor: Flavor,
    f: sys::CUfunction,
    gridDimX: c_uint,
    gridDimY: c_uint,
    gridDimZ: c_uint,
    blockDimX: c_uint,
    blockDimY: c_uint,
    blockDimZ: c_uint,
    sharedMemBytes: c_uint,
    hStream: sys::CUstream,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    let threads = u64::from(blockDimX) * u64::from(blockDimY) * u64::from(blockDimZ);
    let ok = gridDimX != 0
        && gridDimX <= 0x7fff_ffff
        && gridDimY.wrapping_sub(1) < 65_535
        && gridDimZ.wrapping_sub(1) < 65_535
        && threads.wrapping_sub(1) < 1024
        && blockDimZ <= 64
        && sharedMemBytes <= 48 << 10;
    if launch_free(flavor, f, ok, hStream) {
        return SUCCESS;
    }
    guard(|| {
        let grid = [gridDimX, gridDimY, gridDimZ];
        let block = [blockDimX, blockDimY, blockDimZ];
        launch(flavor, f, grid, block, sharedMemBytes, hStream, kernelParams, extra, false)
    })
}

#[cold]
unsafe fn launch(
    flavor: Flavor,
    f: sys::CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    hStream: sys::CUstream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    cooperative: bool,
) -> Answer {
    if hStream as usize <= 2 || current_opt().is_none() {
        current()?;
    }
    let function = Object::<Function>::get(f)?;
    let stream = stream(flavor, hStream)?;
    let first = first_argument(function, params, extra);
    let launch = Launch {
        function,
        grid,
        block,
        shared,
        first,
        params: params as usize,
        extra: extra as usize,
        cooperative,
    };
    launch.check()?;
    legacy_not_implied(stream)?;
    submit(stream, Node::Kernel(launch))
}

pub(super) unsafe fn cuLaunchKernelEx(
    flavor: Flavor,
    config: *const sys::CUlaunchConfig,
    f: sys::CUfunction,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer {
    if config.is_null() {
        return Err(INVALID_VALUE);
    }
    let c = &*config;
    let grid = [c.gridDimX, c.gridDimY, c.gridDimZ];
    let block = [c.blockDimX, c.blockDimY, c.blockDimZ];
    // CU_LAUNCH_ATTRIBUTE_COOPERATIVE is 2: read as integers, a program may pass attributes newer than the bindings.
    let mut cooperative = false;
    for i in 0..c.numAttrs as usize {
        let attribute = c.attrs.add(i).cast::<u32>();
        if attribute.read_unaligned() == 2 {
            cooperative = attribute.add(2).read_unaligned() != 0;
        }
    }
    let threads = u64::from(block[0]) * u64::from(block[1]) * u64::from(block[2]);
    let ok =
        !cooperative && threads.wrapping_sub(1) < 1024 && !grid.contains(&0) && c.sharedMemBytes <= 48 << 10;
    if launch_free(flavor, f, ok, c.hStream) {
        return Ok(());
    }
    launch(flavor, f, grid, block, c.sharedMemBytes, c.hStream, kernelParams, extra, cooperative)
}

pub(super) unsafe fn cuLaunchCooperativeKernel(
    flavor: Flavor,
    f: sys::CUfunction,
    gridDimX: c_uint,
    gridDimY: c_uint,
    gridDimZ: c_uint,
    blockDimX: c_uint,
    blockDimY: c_uint,
    blockDimZ: c_uint,
    sharedMemBytes: c_uint,
    hStream: sys::CUstream,
    kernelParams: *mut *mut c_void,
) -> Answer {
    let grid = [gridDimX, gridDimY, gridDimZ];
    let block = [blockDimX, blockDimY, blockDimZ];
    calls::launch();
    launch(flavor, f, grid, block, sharedMemBytes, hStream, kernelParams, std::ptr::null_mut(), true)
}

pub(super) unsafe fn cuLaunchCooperativeKernelMultiDevice(
    launchParamsList: *mut sys::CUDA_LAUNCH_PARAMS,
    numDevices: c_uint,
    _flags: c_uint,
) -> Answer {
    if launchParamsList.is_null() || numDevices == 0 {
        return Err(INVALID_VALUE);
    }
    calls::launch();
    for i in 0..numDevices as usize {
        let p = &*launchParamsList.add(i);
        if p.hStream as usize <= 2 {
            return Err(INVALID_HANDLE);
        }
        let grid = [p.gridDimX, p.gridDimY, p.gridDimZ];
        let block = [p.blockDimX, p.blockDimY, p.blockDimZ];
        let none = std::ptr::null_mut();
        launch(
            Flavor::Legacy,
            p.function,
            grid,
            block,
            p.sharedMemBytes,
            p.hStream,
            p.kernelParams,
            none,
            true,
        )?;
    }
    Ok(())
}

pub(super) unsafe fn cuFuncSetBlockShape(hfunc: sys::CUfunction, x: c_int, y: c_int, z: c_int) -> Answer {
    let function = Object::<Function>::get(hfunc)?;
    if x <= 0 || y <= 0 || z <= 0 {
        return Err(INVALID_VALUE);
    }
    *lock(&function.block) = [x as u32, y as u32, z as u32];
    Ok(())
}

unsafe fn launch_old(f: sys::CUfunction, width: c_int, height: c_int, hStream: sys::CUstream) -> Answer {
    let block = *lock(&Object::<Function>::get(f)?.block);
    if width <= 0 || height <= 0 {
        return Err(INVALID_VALUE);
    }
    let none = std::ptr::null_mut();
    calls::launch();
    launch(Flavor::Legacy, f, [width as u32, height as u32, 1], block, 0, hStream, none, none, false)
}

pub(super) unsafe fn cuLaunch(f: sys::CUfunction) -> Answer {
    launch_old(f, 1, 1, std::ptr::null_mut())
}

pub(super) unsafe fn cuLaunchGrid(f: sys::CUfunction, grid_width: c_int, grid_height: c_int) -> Answer {
    launch_old(f, grid_width, grid_height, std::ptr::null_mut())
}

pub(super) unsafe fn cuLaunchGridAsync(
    f: sys::CUfunction,
    grid_width: c_int,
    grid_height: c_int,
    hStream: sys::CUstream,
) -> Answer {
    launch_old(f, grid_width, grid_height, hStream)
}

pub(super) unsafe fn cuFuncSetSharedSize(hfunc: sys::CUfunction, _bytes: c_uint) -> Answer {
    Object::<Function>::get(hfunc)?;
    Ok(())
}

pub(super) unsafe fn cuParamSetSize(hfunc: sys::CUfunction, _numbytes: c_uint) -> Answer {
    Object::<Function>::get(hfunc)?;
    Ok(())
}

// --- Loading ---------------------------------------------------------------------------------------

/// What kind of code lies at `image`: PTX text is read for its kernels, anything else is taken as it is.
unsafe fn read_code(image: *const c_void) -> Result<Code, CUresult> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    let start = std::slice::from_raw_parts(image.cast::<u8>(), 4);
    let binary =
        start == b"\x7fELF" || start == [0x50, 0xed, 0x55, 0xba] || start == [0xb1, 0x43, 0x62, 0x46];
    if binary || !(start[0].is_ascii_whitespace() || start[0] == b'/' || start[0] == b'.') {
        return Ok(Code { names: None, globals: BTreeMap::new() });
    }
    let text = CStr::from_ptr(image.cast()).to_string_lossy();
    Ok(read_ptx(&text))
}

fn read_ptx(text: &str) -> Code {
    let mut names = Vec::new();
    let mut globals = BTreeMap::new();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$' || c == '%';
    let text: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    for line in &text {
        if let Some((_, rest)) = line.split_once(".entry") {
            let name: String = rest.trim_start().chars().take_while(|c| is_name(*c)).collect();
            if !name.is_empty() {
                names.push(name);
            }
        } else if (line.contains(".global") || line.contains(".const "))
            && let Some((name, size)) = read_global(line)
        {
            globals.insert(name, size);
        }
    }
    // A name may stand on the line after `.entry`.
    let mut words = text.iter().flat_map(|line| line.split_whitespace());
    while let Some(word) = words.next() {
        if word == ".entry"
            && let Some(next) = words.next()
        {
            let name: String = next.chars().take_while(|c| is_name(*c)).collect();
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
    }
    Code { names: Some(names), globals }
}

/// `.visible .global .align 4 .b8 name[16];` -> (name, 16).
fn read_global(line: &str) -> Option<(String, u64)> {
    let declaration = line.split(['=', ';']).next()?.trim();
    let name_part = declaration.split_whitespace().last()?;
    let (name, count) = match name_part.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(1)),
        None => (name_part, 1),
    };
    let width = declaration
        .split_whitespace()
        .filter_map(|w| w.strip_prefix('.'))
        .filter_map(|w| w.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<u64>().ok())
        .find(|bits| matches!(bits, 8 | 16 | 32 | 64 | 128))?;
    (!name.starts_with('.')).then(|| (name.to_owned(), width / 8 * count))
}

fn create(code: Code, is_library: bool) -> &'static Object<Module> {
    Object::create(Module { code, is_library, functions: Mutex::default(), globals: Mutex::default() })
}

impl Module {
    fn function(this: &'static Object<Self>, name: &CStr) -> Result<&'static Object<Function>, CUresult> {
        let text = name.to_string_lossy().into_owned();
        if this.code.names.as_ref().is_some_and(|names| !names.contains(&text)) {
            return Err(NOT_FOUND);
        }
        let driver = driver()?;
        let mut functions = lock(&this.functions);
        if let Some(function) = functions.get(&text) {
            return Ok(function);
        }
        let named = driver.profile().named(&text);
        let function = Object::create(Function {
            name: name.to_owned(),
            module: this,
            named,
            free: named.duration == Duration::Fixed(0),
            shared_max: AtomicI32::new(48 << 10),
            carveout: AtomicI32::new(-1),
            block: Mutex::new([1, 1, 1]),
        });
        functions.insert(text, function);
        Ok(function)
    }

    fn global(&self, name: &str) -> Result<(u64, u64), CUresult> {
        if let Some(found) = lock(&self.globals).get(name) {
            return Ok(*found);
        }
        let bytes = *self.code.globals.get(name).ok_or(NOT_FOUND)?;
        let context = current()?;
        let address = memory::allocate(context, bytes.max(1), crate::sim::MemKind::Plain)?;
        lock(&self.globals).insert(name.to_owned(), (address, bytes));
        Ok((address, bytes))
    }

    fn unload(this: &'static Object<Self>) -> Answer {
        if !this.retire() {
            return Err(INVALID_HANDLE);
        }
        for function in lock(&this.functions).values() {
            function.retire();
        }
        for (address, _) in std::mem::take(&mut *lock(&this.globals)).into_values() {
            memory::free(address)?;
        }
        Ok(())
    }
}

pub(super) unsafe fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void) -> Answer {
    current()?;
    put(module, create(read_code(image)?, false).handle())
}

pub(super) unsafe fn cuModuleLoadDataEx(
    module: *mut sys::CUmodule,
    image: *const c_void,
    _numOptions: c_uint,
    _options: *mut c_uint,
    _optionValues: *mut *mut c_void,
) -> Answer {
    cuModuleLoadData(module, image)
}

pub(super) unsafe fn cuModuleLoadFatBinary(module: *mut sys::CUmodule, fatCubin: *const c_void) -> Answer {
    cuModuleLoadData(module, fatCubin)
}

unsafe fn code_of_file(path: *const c_char) -> Result<Code, CUresult> {
    if path.is_null() {
        return Err(INVALID_VALUE);
    }
    let path = CStr::from_ptr(path).to_string_lossy().into_owned();
    let mut bytes = std::fs::read(path).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
    bytes.extend([0; 4]);
    read_code(bytes.as_ptr().cast())
}

pub(super) unsafe fn cuModuleLoad(module: *mut sys::CUmodule, fname: *const c_char) -> Answer {
    current()?;
    put(module, create(code_of_file(fname)?, false).handle())
}

pub(super) unsafe fn cuModuleUnload(hmod: sys::CUmodule) -> Answer {
    current()?;
    Module::unload(Object::<Module>::get(hmod)?)
}

pub(super) unsafe fn cuModuleGetLoadingMode(mode: *mut c_uint) -> Answer {
    put(mode, 2)
}

unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a CStr, CUresult> {
    if name.is_null() { Err(INVALID_VALUE) } else { Ok(CStr::from_ptr(name)) }
}

pub(super) unsafe fn cuModuleGetFunction(
    hfunc: *mut sys::CUfunction,
    hmod: sys::CUmodule,
    name: *const c_char,
) -> Answer {
    let function = Module::function(Object::<Module>::get(hmod)?, name_of(name)?)?;
    put(hfunc, function.handle())
}

pub(super) unsafe fn cuModuleGetFunctionCount(count: *mut c_uint, mod_: sys::CUmodule) -> Answer {
    let module = Object::<Module>::get(mod_)?;
    let count_now = match &module.code.names {
        Some(names) => names.len(),
        None => lock(&module.functions).len(),
    };
    put(count, count_now as u32)
}

unsafe fn enumerate<H>(list: *mut *mut H, count: u32, module: &'static Object<Module>) -> Answer {
    for name in module.code.names.iter().flatten() {
        let name = CString::new(name.as_str()).map_err(|_| INVALID_VALUE)?;
        Module::function(module, &name)?;
    }
    for (i, function) in lock(&module.functions).values().take(count as usize).enumerate() {
        put(list.add(i), function.handle())?;
    }
    Ok(())
}

pub(super) unsafe fn cuModuleEnumerateFunctions(
    functions: *mut sys::CUfunction,
    numFunctions: c_uint,
    mod_: sys::CUmodule,
) -> Answer {
    enumerate(functions, numFunctions, Object::<Module>::get(mod_)?)
}

pub(super) unsafe fn cuModuleGetGlobal_v2(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    hmod: sys::CUmodule,
    name: *const c_char,
) -> Answer {
    let (address, size) = Object::<Module>::get(hmod)?.global(&name_of(name)?.to_string_lossy())?;
    put_opt(dptr, address);
    put_opt(bytes, size as usize);
    Ok(())
}

pub(super) unsafe fn cuLibraryLoadData(
    library: *mut sys::CUlibrary,
    code: *const c_void,
    _jitOptions: *mut c_uint,
    _jitOptionsValues: *mut *mut c_void,
    _numJitOptions: c_uint,
    _libraryOptions: *mut c_uint,
    _libraryOptionValues: *mut *mut c_void,
    _numLibraryOptions: c_uint,
) -> Answer {
    driver()?;
    put(library, create(read_code(code)?, true).handle())
}

pub(super) unsafe fn cuLibraryLoadFromFile(
    library: *mut sys::CUlibrary,
    fileName: *const c_char,
    _jitOptions: *mut c_uint,
    _jitOptionsValues: *mut *mut c_void,
    _numJitOptions: c_uint,
    _libraryOptions: *mut c_uint,
    _libraryOptionValues: *mut *mut c_void,
    _numLibraryOptions: c_uint,
) -> Answer {
    driver()?;
    put(library, create(code_of_file(fileName)?, true).handle())
}

pub(super) unsafe fn cuLibraryUnload(library: sys::CUlibrary) -> Answer {
    driver()?;
    Module::unload(Object::<Module>::get(library)?)
}

pub(super) unsafe fn cuLibraryGetKernel(
    pKernel: *mut sys::CUkernel,
    library: sys::CUlibrary,
    name: *const c_char,
) -> Answer {
    let function = Module::function(Object::<Module>::get(library)?, name_of(name)?)?;
    put(pKernel, function.handle())
}

pub(super) unsafe fn cuLibraryGetModule(pMod: *mut sys::CUmodule, library: sys::CUlibrary) -> Answer {
    current()?;
    put(pMod, Object::<Module>::get(library)?.handle())
}

pub(super) unsafe fn cuLibraryGetKernelCount(count: *mut c_uint, lib: sys::CUlibrary) -> Answer {
    cuModuleGetFunctionCount(count, lib.cast())
}

pub(super) unsafe fn cuLibraryEnumerateKernels(
    kernels: *mut sys::CUkernel,
    numKernels: c_uint,
    lib: sys::CUlibrary,
) -> Answer {
    enumerate(kernels, numKernels, Object::<Module>::get(lib)?)
}

pub(super) unsafe fn cuLibraryGetGlobal(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    library: sys::CUlibrary,
    name: *const c_char,
) -> Answer {
    cuModuleGetGlobal_v2(dptr, bytes, library.cast(), name)
}

pub(super) unsafe fn cuKernelGetFunction(pFunc: *mut sys::CUfunction, kernel: sys::CUkernel) -> Answer {
    current()?;
    put(pFunc, Object::<Function>::get(kernel)?.handle())
}

pub(super) unsafe fn cuKernelGetLibrary(pLib: *mut sys::CUlibrary, kernel: sys::CUkernel) -> Answer {
    let function = Object::<Function>::get(kernel)?;
    if !function.module.is_library {
        return Err(INVALID_HANDLE);
    }
    put(pLib, function.module.handle())
}

pub(super) unsafe fn cuKernelGetName(name: *mut *const c_char, hfunc: sys::CUkernel) -> Answer {
    put(name, Object::<Function>::get(hfunc)?.name.as_ptr())
}

pub(super) unsafe fn cuFuncGetName(name: *mut *const c_char, hfunc: sys::CUfunction) -> Answer {
    put(name, Object::<Function>::get(hfunc)?.name.as_ptr())
}

pub(super) unsafe fn cuFuncGetModule(hmod: *mut sys::CUmodule, hfunc: sys::CUfunction) -> Answer {
    put(hmod, Object::<Function>::get(hfunc)?.module.handle())
}

pub(super) unsafe fn cuFuncIsLoaded(state: *mut c_uint, function: sys::CUfunction) -> Answer {
    Object::<Function>::get(function)?;
    put(state, 1)
}

pub(super) unsafe fn cuFuncLoad(function: sys::CUfunction) -> Answer {
    Object::<Function>::get(function)?;
    Ok(())
}

fn attribute(function: &Function, attrib: u32) -> Result<i32, CUresult> {
    let driver = driver()?;
    let profile = driver.profile();
    let (major, minor) = profile.compute_capability;
    let architecture = (major * 10 + minor) as i32;
    Ok(match attrib {
        0 => 1024,
        1..=3 => 0,
        4 => 32,
        5 | 6 => architecture,
        7 => 0,
        8 => function.shared_max.load(Relaxed),
        9 => function.carveout.load(Relaxed),
        10..=15 => 0,
        _ => return Err(INVALID_VALUE),
    })
}

fn set_attribute(function: &Function, attrib: u32, value: i32) -> Answer {
    match attrib {
        8 => {
            let most = driver()?.profile().shared_memory_per_sm_bytes as i32;
            if value < 0 || value > most {
                return Err(INVALID_VALUE);
            }
            function.shared_max.store(value, Relaxed);
            Ok(())
        }
        9 => {
            if !(-1..=100).contains(&value) {
                return Err(INVALID_VALUE);
            }
            function.carveout.store(value, Relaxed);
            Ok(())
        }
        10..=15 => Ok(()),
        _ => Err(INVALID_VALUE),
    }
}

pub(super) unsafe fn cuFuncGetAttribute(pi: *mut c_int, attrib: c_uint, hfunc: sys::CUfunction) -> Answer {
    put(pi, attribute(Object::<Function>::get(hfunc)?, attrib)?)
}

pub(super) unsafe fn cuFuncSetAttribute(hfunc: sys::CUfunction, attrib: c_uint, value: c_int) -> Answer {
    set_attribute(Object::<Function>::get(hfunc)?, attrib, value)
}

pub(super) unsafe fn cuKernelGetAttribute(
    pi: *mut c_int,
    attrib: c_uint,
    kernel: sys::CUkernel,
    dev: CUdevice,
) -> Answer {
    driver()?.gpu(dev)?;
    put(pi, attribute(Object::<Function>::get(kernel)?, attrib)?)
}

pub(super) unsafe fn cuKernelSetAttribute(
    attrib: c_uint,
    val: c_int,
    kernel: sys::CUkernel,
    dev: CUdevice,
) -> Answer {
    driver()?.gpu(dev)?;
    set_attribute(Object::<Function>::get(kernel)?, attrib, val)
}

pub(super) unsafe fn cuFuncSetCacheConfig(hfunc: sys::CUfunction, _config: c_uint) -> Answer {
    Object::<Function>::get(hfunc)?;
    Ok(())
}

pub(super) unsafe fn cuFuncSetSharedMemConfig(hfunc: sys::CUfunction, _config: c_uint) -> Answer {
    Object::<Function>::get(hfunc)?;
    Ok(())
}

pub(super) unsafe fn cuKernelSetCacheConfig(kernel: sys::CUkernel, _config: c_uint, dev: CUdevice) -> Answer {
    driver()?.gpu(dev)?;
    Object::<Function>::get(kernel)?;
    Ok(())
}

// --- Occupancy -------------------------------------------------------------------------------------

fn blocks_per_sm(block: i32, shared: usize) -> Result<i32, CUresult> {
    let profile = driver()?.profile();
    if !(1..=1024).contains(&block) {
        return Err(INVALID_VALUE);
    }
    let by_threads = profile.threads_per_sm / (block as u32).next_multiple_of(32);
    let by_shared =
        (profile.shared_memory_per_sm_bytes as usize).checked_div(shared).map_or(u32::MAX, |n| n as u32);
    Ok(by_threads.min(profile.blocks_per_sm).min(by_shared) as i32)
}

pub(super) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    numBlocks: *mut c_int,
    func: sys::CUfunction,
    blockSize: c_int,
    dynamicSMemSize: usize,
) -> Answer {
    Object::<Function>::get(func)?;
    put(numBlocks, blocks_per_sm(blockSize, dynamicSMemSize)?)
}

pub(super) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    numBlocks: *mut c_int,
    func: sys::CUfunction,
    blockSize: c_int,
    dynamicSMemSize: usize,
    _flags: c_uint,
) -> Answer {
    cuOccupancyMaxActiveBlocksPerMultiprocessor(numBlocks, func, blockSize, dynamicSMemSize)
}

pub(super) unsafe fn cuOccupancyMaxPotentialBlockSize(
    minGridSize: *mut c_int,
    blockSize: *mut c_int,
    func: sys::CUfunction,
    _blockSizeToDynamicSMemSize: sys::CUoccupancyB2DSize,
    dynamicSMemSize: usize,
    blockSizeLimit: c_int,
) -> Answer {
    Object::<Function>::get(func)?;
    let size = if (1..1024).contains(&blockSizeLimit) { blockSizeLimit } else { 1024 };
    let fit = blocks_per_sm(size, dynamicSMemSize)?;
    put(minGridSize, fit * current_profile()?.sms as i32)?;
    put(blockSize, size)
}

pub(super) unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    minGridSize: *mut c_int,
    blockSize: *mut c_int,
    func: sys::CUfunction,
    blockSizeToDynamicSMemSize: sys::CUoccupancyB2DSize,
    dynamicSMemSize: usize,
    blockSizeLimit: c_int,
    _flags: c_uint,
) -> Answer {
    cuOccupancyMaxPotentialBlockSize(
        minGridSize,
        blockSize,
        func,
        blockSizeToDynamicSMemSize,
        dynamicSMemSize,
        blockSizeLimit,
    )
}

pub(super) unsafe fn cuOccupancyAvailableDynamicSMemPerBlock(
    dynamicSmemSize: *mut usize,
    func: sys::CUfunction,
    numBlocks: c_int,
    blockSize: c_int,
) -> Answer {
    Object::<Function>::get(func)?;
    blocks_per_sm(blockSize, 0)?;
    if numBlocks <= 0 {
        return Err(INVALID_VALUE);
    }
    put(dynamicSmemSize, driver()?.profile().shared_memory_per_sm_bytes as usize / numBlocks as usize)
}

// --- The linker: what is added comes out again, as an image that the loader accepts -------------------

#[derive(Debug, Default)]
struct Link {
    image: Mutex<Vec<u8>>,
}

impl Kind for Link {
    const MAGIC: u64 = 0x6773_6861_7265_4c4b;
}

pub(super) unsafe fn cuLinkCreate_v2(
    _numOptions: c_uint,
    _options: *mut c_uint,
    _optionValues: *mut *mut c_void,
    stateOut: *mut sys::CUlinkState,
) -> Answer {
    current()?;
    put(stateOut, Object::create(Link::default()).handle())
}

pub(super) unsafe fn cuLinkAddData_v2(
    state: sys::CUlinkState,
    _type_: c_uint,
    data: *mut c_void,
    size: usize,
    _name: *const c_char,
    _numOptions: c_uint,
    _options: *mut c_uint,
    _optionValues: *mut *mut c_void,
) -> Answer {
    let link = Object::<Link>::get(state)?;
    if data.is_null() {
        return Err(INVALID_VALUE);
    }
    let bytes = std::slice::from_raw_parts(data.cast::<u8>(), size);
    let mut image = lock(&link.image);
    image.extend(bytes.iter().filter(|b| **b != 0 || !bytes.is_ascii()));
    image.push(b'\n');
    Ok(())
}

pub(super) unsafe fn cuLinkAddFile_v2(
    state: sys::CUlinkState,
    _type_: c_uint,
    path: *const c_char,
    _numOptions: c_uint,
    _options: *mut c_uint,
    _optionValues: *mut *mut c_void,
) -> Answer {
    let link = Object::<Link>::get(state)?;
    let path = name_of(path)?.to_string_lossy().into_owned();
    let bytes = std::fs::read(path).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
    lock(&link.image).extend(bytes);
    Ok(())
}

pub(super) unsafe fn cuLinkComplete(
    state: sys::CUlinkState,
    cubinOut: *mut *mut c_void,
    sizeOut: *mut usize,
) -> Answer {
    let link = Object::<Link>::get(state)?;
    let mut image = lock(&link.image);
    image.extend([0; 4]);
    put(cubinOut, image.as_mut_ptr().cast())?;
    put_opt(sizeOut, image.len() - 4);
    Ok(())
}

pub(super) unsafe fn cuLinkDestroy(state: sys::CUlinkState) -> Answer {
    let link = Object::<Link>::get(state)?;
    link.retire();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_names_and_globals_are_read() {
        let ptx = "// a comment .entry no\n.version 7.0\n.visible .entry spin_10us(\n.param .u64 p\n)\n{ret;}\n\
                   .entry\n  second ( )\n.visible .global .align 4 .b8 table[16];\n.global .u32 one;\n";
        let code = read_ptx(ptx);
        assert_eq!(code.names, Some(vec!["spin_10us".to_owned(), "second".to_owned()]));
        assert_eq!(
            code.globals.into_iter().collect::<Vec<_>>(),
            [("one".to_owned(), 4), ("table".to_owned(), 16)]
        );
    }
}
