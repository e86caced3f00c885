//! Modules, libraries, functions, kernels and launches.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI32};

use super::base::*;
use super::graph::{Node, legacy_not_implied};
use super::*;
use crate::image::raw::{self, Lifetime};
use crate::image::{Found, Image, Shape, container};
use crate::sim::Work;
use gshare_fake_cuda_spec::{Duration, Named, Profile};

/// A module or a library (both hold code and give out functions).
#[derive(Debug)]
pub(crate) struct Module {
    image: Image,
    is_library: bool,
    functions: Mutex<BTreeMap<String, &'static Object<Function>>>,
    /// By the context's number and the variable's name.
    globals: Mutex<BTreeMap<(u64, String), Global>>,
}

/// A global variable of a module in one context.
#[derive(Debug)]
struct Global {
    context: &'static Object<Context>,
    address: u64,
    bytes: u64,
}

/// Size of a global variable whose image cannot be read: most constant memory that a kernel can have.
const UNREADABLE_GLOBAL_BYTES: u64 = 64 << 10;

const INVALID_IMAGE: CUresult = CUresult(200);
const NO_BINARY: CUresult = CUresult(209);

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
    shape: Shape,
    /// Whether clusters may have more blocks than every device of the architecture takes.
    large_clusters: AtomicBool,
    shared_max: AtomicI32,
    carveout: AtomicI32,
    /// For cuFuncSetBlockShape and cuLaunch.
    block: Mutex<[u32; 3]>,
}

impl Kind for Function {
    const MAGIC: u64 = 0x6773_6861_7265_4655;
}

/// The profile of the calling thread's device, or of the GPU.
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
            || self.threads() > self.function.shape.threads
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

/// Threads of a block that no declaration of a kernel that costs nothing forbids, for the short way.
const FEW_THREADS: u64 = 32;

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
        && threads.wrapping_sub(1) < FEW_THREADS
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
    let cooperative = attribute_of::<u32>(c, COOPERATIVE).is_some_and(|value| value != 0);
    if c.numAttrs > 0 {
        cluster(c, Object::<Function>::get(f)?)?;
    }
    let threads = u64::from(block[0]) * u64::from(block[1]) * u64::from(block[2]);
    let ok = !cooperative
        && threads.wrapping_sub(1) < FEW_THREADS
        && !grid.contains(&0)
        && c.sharedMemBytes <= 48 << 10;
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

/// The image at an address, for the calling thread's device.
unsafe fn read_image(image: *const c_void, lifetime: Lifetime) -> Result<Image, CUresult> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    let (major, minor) = current_profile()?.compute_capability;
    raw::image_at(image, major * 10 + minor, lifetime).ok_or(INVALID_IMAGE)
}

fn create_library(image: Image) -> &'static Object<Module> {
    Object::create(Module { image, is_library: true, functions: Mutex::default(), globals: Mutex::default() })
}

/// A module is for one device: an image without code for it is refused.
fn create_module(image: Image) -> Result<&'static Object<Module>, CUresult> {
    if image.is_empty() {
        return Err(NO_BINARY);
    }
    let (functions, globals) = (Mutex::default(), Mutex::default());
    Ok(Object::create(Module { image, is_library: false, functions, globals }))
}

impl Module {
    fn function(this: &'static Object<Self>, name: &CStr) -> Result<&'static Object<Function>, CUresult> {
        let text = name.to_string_lossy().into_owned();
        if let Some(function) = lock(&this.functions).get(&text) {
            return Ok(function);
        }
        let shape = match this.image.kernel(&text) {
            Found::No if this.image.is_empty() => return Err(NO_BINARY),
            Found::No => return Err(NOT_FOUND),
            Found::Yes(shape) => shape,
            Found::Unknown => Shape::default(),
        };
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
            shape,
            large_clusters: AtomicBool::new(false),
            shared_max: AtomicI32::new((48 << 10) - shape.shared.min(48 << 10) as i32),
            carveout: AtomicI32::new(-1),
            block: Mutex::new([1, 1, 1]),
        });
        functions.insert(text, function);
        Ok(function)
    }

    /// Address and size of a global variable in the current context; its memory is taken when it is first asked for.
    fn global(&self, name: &str) -> Result<(u64, u64), CUresult> {
        let context = current()?;
        let key = (context.id, name.to_owned());
        if let Some(found) = lock(&self.globals).get(&key) {
            return Ok((found.address, found.bytes));
        }
        let bytes = match self.image.global(name) {
            Found::Yes(bytes) => bytes,
            Found::Unknown => UNREADABLE_GLOBAL_BYTES,
            Found::No => return Err(NOT_FOUND),
        };
        let mut globals = lock(&self.globals);
        if let Some(found) = globals.get(&key) {
            return Ok((found.address, found.bytes));
        }
        let address = memory::allocate(context, bytes.max(1), crate::sim::MemKind::Plain)?;
        globals.insert(key, Global { context, address, bytes });
        Ok((address, bytes))
    }

    fn unload(this: &'static Object<Self>) -> Answer {
        if !this.retire() {
            return Err(INVALID_HANDLE);
        }
        for function in lock(&this.functions).values() {
            function.retire();
        }
        // A context that has ended took its memory along.
        for global in std::mem::take(&mut *lock(&this.globals)).into_values() {
            if global.context.live() {
                memory::free(global.address)?;
            }
        }
        Ok(())
    }
}

pub(super) unsafe fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void) -> Answer {
    current()?;
    put(module, create_module(read_image(image, Lifetime::Call)?)?.handle())
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

unsafe fn image_of_file(path: *const c_char) -> Result<Image, CUresult> {
    if path.is_null() {
        return Err(INVALID_VALUE);
    }
    let path = CStr::from_ptr(path).to_string_lossy().into_owned();
    let mut bytes = std::fs::read(path).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
    bytes.extend([0; 4]);
    read_image(bytes.as_ptr().cast(), Lifetime::Call)
}

pub(super) unsafe fn cuModuleLoad(module: *mut sys::CUmodule, fname: *const c_char) -> Answer {
    current()?;
    put(module, create_module(image_of_file(fname)?)?.handle())
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
    let count_now = match module.image.kernels() {
        Some(names) => names.len(),
        None => lock(&module.functions).len(),
    };
    put(count, count_now as u32)
}

unsafe fn enumerate<H>(list: *mut *mut H, count: u32, module: &'static Object<Module>) -> Answer {
    for name in module.image.kernels().into_iter().flatten() {
        let name = CString::new(name).map_err(|_| INVALID_VALUE)?;
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
    libraryOptions: *mut c_uint,
    _libraryOptionValues: *mut *mut c_void,
    numLibraryOptions: c_uint,
) -> Answer {
    /// `CU_LIBRARY_BINARY_IS_PRESERVED`: the program keeps the image until it unloads the library.
    const PRESERVED: c_uint = 1;
    driver()?;
    let count = if libraryOptions.is_null() { 0 } else { numLibraryOptions as usize };
    let kept = (0..count).any(|i| libraryOptions.add(i).read_unaligned() == PRESERVED);
    let lifetime = if kept { Lifetime::Kept } else { Lifetime::Call };
    put(library, create_library(read_image(code, lifetime)?).handle())
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
    put(library, create_library(image_of_file(fileName)?).handle())
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
        0 => function.shape.threads as i32,
        1 => function.shape.shared as i32,
        2 | 3 => 0,
        4 => 32,
        5 | 6 => architecture,
        7 => 0,
        8 => function.shared_max.load(Relaxed),
        9 => function.carveout.load(Relaxed),
        14 => function.large_clusters.load(Relaxed).into(),
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
        14 => {
            function.large_clusters.store(value != 0, Relaxed);
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

/// Shared memory of each block that is the driver's, in bytes (`CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK`).
const RESERVED_SHARED: usize = 1 << 10;

fn blocks_per_sm(function: &Function, block: i32, dynamic: usize) -> Result<i32, CUresult> {
    let profile = driver()?.profile();
    if !(1..=1024).contains(&block) {
        return Err(INVALID_VALUE);
    }
    let shared = dynamic + function.shape.shared as usize;
    let by_threads = profile.threads_per_sm / (block as u32).next_multiple_of(32);
    // Each block takes a kilobyte for the driver beside what it asks for.
    let by_shared = profile.shared_memory_per_sm_bytes as usize / (shared + RESERVED_SHARED);
    let by_shared = u32::try_from(by_shared).unwrap_or(u32::MAX);
    Ok(by_threads.min(profile.blocks_per_sm).min(by_shared) as i32)
}

pub(super) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    numBlocks: *mut c_int,
    func: sys::CUfunction,
    blockSize: c_int,
    dynamicSMemSize: usize,
) -> Answer {
    put(numBlocks, blocks_per_sm(Object::<Function>::get(func)?, blockSize, dynamicSMemSize)?)
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
    let function = Object::<Function>::get(func)?;
    let most = function.shape.threads as i32;
    let size = if (1..most).contains(&blockSizeLimit) { blockSizeLimit } else { most };
    let fit = blocks_per_sm(function, size, dynamicSMemSize)?;
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
    let function = Object::<Function>::get(func)?;
    blocks_per_sm(function, blockSize, 0)?;
    if numBlocks <= 0 {
        return Err(INVALID_VALUE);
    }
    let part = driver()?.profile().shared_memory_per_sm_bytes as usize / numBlocks as usize;
    let part = part.saturating_sub(function.shape.shared as usize);
    put(dynamicSmemSize, part.min(function.shared_max.load(Relaxed).max(0) as usize))
}

/// Numbers of `CUlaunchAttributeID`.
const COOPERATIVE: u32 = 2;
const CLUSTER_DIMENSION: u32 = 4;

/// The value of a launch's attribute, the last one where there are several. Read as integers: a program may pass attributes newer
/// than the bindings.
///
/// # Safety
/// `config` has as many attributes as it says, and `T` is integers that the attribute's value begins with.
unsafe fn attribute_of<T: Copy>(config: &sys::CUlaunchConfig, id: u32) -> Option<T> {
    let mut all = (0..config.numAttrs as usize).map(|i| config.attrs.add(i).cast::<u32>());
    // A number and a word of padding come before the value.
    all.rfind(|at| at.read_unaligned() == id).map(|at| at.add(2).cast::<T>().read_unaligned())
}

/// Blocks of the cluster that a launch asks for; 0 for none. `CUDA_ERROR_INVALID_CLUSTER_SIZE` where there are too many.
///
/// # Safety
/// `config` is readable, and as many attributes as it says.
unsafe fn cluster(config: &sys::CUlaunchConfig, function: &Function) -> Result<u32, CUresult> {
    let dimensions = attribute_of::<[u32; 3]>(config, CLUSTER_DIMENSION);
    let blocks = dimensions.map_or(0, |by| by.into_iter().fold(1, u32::saturating_mul));
    if blocks > largest_cluster(function) { Err(CUresult(912)) } else { Ok(blocks) }
}

/// Blocks of the largest cluster: 8 on every device that has clusters, 16 where a function waives that (CUDA C++ programming
/// guide, on thread block clusters).
fn largest_cluster(function: &Function) -> u32 {
    if function.large_clusters.load(Relaxed) { 16 } else { 8 }
}

/// The profile of a device with clusters.
fn with_clusters() -> Result<&'static Profile, CUresult> {
    current_profile().and_then(|p| if p.compute_capability.0 < 9 { Err(NOT_SUPPORTED) } else { Ok(p) })
}

pub(super) unsafe fn cuOccupancyMaxPotentialClusterSize(
    clusterSize: *mut c_int,
    func: sys::CUfunction,
    config: *const sys::CUlaunchConfig,
) -> Answer {
    let function = Object::<Function>::get(func)?;
    with_clusters()?;
    cluster(config.as_ref().ok_or(INVALID_VALUE)?, function)?;
    put(clusterSize, largest_cluster(function) as c_int)
}

/// Clusters that run at once. The blocks of one run side by side on SMs of one group: an H100 and an H200 with 132 SMs had room
/// for clusters of 3 to 8 blocks on 124 of them and for clusters of 16 on 116, with at most 8 blocks an SM.
pub(super) unsafe fn cuOccupancyMaxActiveClusters(
    numClusters: *mut c_int,
    func: sys::CUfunction,
    config: *const sys::CUlaunchConfig,
) -> Answer {
    const BLOCKS_PER_SM: i32 = 8;
    let function = Object::<Function>::get(func)?;
    let sms = with_clusters()?.sms;
    let config = config.as_ref().ok_or(INVALID_VALUE)?;
    let size = cluster(config, function)?;
    let threads = config.blockDimX.saturating_mul(config.blockDimY).saturating_mul(config.blockDimZ);
    let fit =
        blocks_per_sm(function, i32::try_from(threads).unwrap_or(i32::MAX), config.sharedMemBytes as usize)?;
    let usable = match size {
        0..=2 => sms,
        3..=8 => sms - sms / 16,
        _ => sms - sms / 8,
    };
    let blocks = usable * fit.min(BLOCKS_PER_SM) as u32;
    put(numClusters, blocks.checked_div(size).unwrap_or(0) as c_int)
}

// --- The linker: what is added comes out again, as a container that the loader accepts ----------------

#[derive(Debug, Default)]
struct Link {
    inputs: Mutex<Vec<Vec<u8>>>,
    /// The image that was given out; the program may read it until it destroys the link.
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
    lock(&link.inputs).push(std::slice::from_raw_parts(data.cast::<u8>(), size).to_vec());
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
    lock(&link.inputs).push(bytes);
    Ok(())
}

pub(super) unsafe fn cuLinkComplete(
    state: sys::CUlinkState,
    cubinOut: *mut *mut c_void,
    sizeOut: *mut usize,
) -> Answer {
    let link = Object::<Link>::get(state)?;
    let inputs = lock(&link.inputs);
    let mut image = lock(&link.image);
    *image = container::of_inputs(inputs.iter().map(|bytes| (raw::input_kind(bytes), bytes.as_slice())));
    put(cubinOut, image.as_mut_ptr().cast())?;
    put_opt(sizeOut, image.len());
    Ok(())
}

pub(super) unsafe fn cuLinkDestroy(state: sys::CUlinkState) -> Answer {
    let link = Object::<Link>::get(state)?;
    link.retire();
    Ok(())
}
