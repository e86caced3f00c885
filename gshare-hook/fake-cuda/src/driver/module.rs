//! Modules, libraries, functions, kernels and launches.

use std::ffi::{CStr, CString};

use super::capture::{any_capture, legacy_not_implied, submit};
use super::tasks::Task;
use super::*;
use crate::image::raw::{self, Lifetime};
use crate::image::{Found, Image, Shape, container};
use gshare_fake_cuda_spec::{Duration, Named, Profile};

/// A module or a library: both hold code and give out functions.
pub(crate) struct Module {
    image: Image,
    is_library: bool,
    /// Whether the program makes the values of its kernels itself.
    for_time: bool,
    functions: Mutex<BTreeMap<String, Ref<Function>>>,
    /// By the context's number and the variable's name.
    globals: Mutex<BTreeMap<(u64, String), Global>>,
}

/// A global variable of a module in one context.
struct Global {
    context: Ref<Context>,
    address: u64,
    bytes: u64,
}

/// Size of a global variable in an unreadable image: the most constant memory of a kernel.
const UNREADABLE_GLOBAL_BYTES: u64 = 64 << 10;

const INVALID_IMAGE: CUresult = CUresult::CUDA_ERROR_INVALID_IMAGE;
const NO_BINARY: CUresult = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU;

object!(Module, b"gshareMO");

/// A function of a module, or a kernel of a library: the same object serves as `CUfunction` and `CUkernel`.
pub(crate) struct Function {
    pub(crate) name: CString,
    module: Ref<Module>,
    pub(crate) named: Named,
    /// Whether nothing is missing after a launch: the program makes its values, or it has none.
    pub(crate) complete: bool,
    /// Whether a launch takes no time, and need not be looked at.
    free: bool,
    shape: Shape,
    /// Attributes which a program may set, by number of `CUfunction_attribute`.
    attributes: [AtomicI32; 16],
    /// Set by cuFuncSetBlockShape, for cuLaunch.
    block: Mutex<[u32; 3]>,
}

object!(Function, b"gshareFU");

/// Most bytes of shared memory of a launch; the carveout; whether clusters may exceed the size common to all devices of the architecture.
const SHARED_MAX: usize = 8;
const CARVEOUT: usize = 9;
const LARGE_CLUSTERS: usize = 14;

impl Function {
    fn attribute(&self, number: usize) -> i32 {
        self.attributes[number].load(Relaxed)
    }
}

/// The profile of the calling thread's device, or of the GPU.
fn current_profile() -> Res<&'static Profile> {
    let driver = driver()?;
    Ok(current_opt().map_or(driver.profile(), |context| context.device.profile()))
}

/// Geometry of a launch: its blocks, the threads and the shared memory of a block, and whether all blocks must run at once.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) cooperative: bool,
}

impl Geometry {
    /// Whether the block has a size no declaration can forbid, so a free kernel may take the short way.
    #[inline(always)]
    fn is_small(&self) -> bool {
        const FEW_THREADS: u64 = 32;
        let ([gx, gy, gz], [bx, by, bz]) = (self.grid, self.block);
        let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        gx.wrapping_sub(1) < 0x7fff_ffff
            && gy.wrapping_sub(1) < 65_535
            && gz.wrapping_sub(1) < 65_535
            && threads.wrapping_sub(1) < FEW_THREADS
            && self.shared <= 48 << 10
            && !self.cooperative
    }
}

/// Addresses of the arguments one by one, or of a list which describes them.
type Arguments = (*mut *mut c_void, *mut *mut c_void);

impl Function {
    /// Whether its first argument is a device address that it uses.
    fn uses_memory(&self) -> bool {
        matches!(self.named.duration, Duration::Fixed(_)) && self.name.to_bytes().starts_with(b"use_")
    }
}

/// One launch, priced.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) function: Ref<Function>,
    pub(crate) geometry: Geometry,
    pub(crate) first: Option<u64>,
    pub(crate) params: usize,
    pub(crate) extra: usize,
}

impl Launch {
    /// A valid launch.
    pub(crate) unsafe fn new(function: Ref<Function>, geometry: Geometry, arguments: Arguments) -> Res<Self> {
        let first = first_argument(function, arguments);
        let (params, extra) = (arguments.0 as usize, arguments.1 as usize);
        let launch = Self { function, geometry, first, params, extra };
        launch.check().map(|()| launch)
    }

    fn blocks(&self) -> u64 {
        self.geometry.grid.iter().map(|n| u64::from(*n)).fold(1, u64::saturating_mul)
    }

    fn threads(&self) -> u32 {
        self.geometry.block.iter().fold(1_u32, |a, n| a.saturating_mul(*n))
    }

    /// Makes the driver's checks before a launch.
    fn check(&self) -> Answer {
        VALUES.launch(self.function)?;
        const MOST: [u32; 6] = [0x7fff_ffff, 65_535, 65_535, 1024, 1024, 64];
        let mut sizes = self.geometry.grid.iter().chain(&self.geometry.block).zip(MOST);
        invalid_if(sizes.any(|(size, most)| *size == 0 || *size > most))?;
        invalid_if(self.threads() > self.function.shape.threads)?;
        let profile = current_profile()?;
        invalid_if(self.geometry.shared > profile.shared_memory_per_sm_bytes)?;
        if self.geometry.cooperative {
            let fit = (profile.threads_per_sm / self.threads()).clamp(1, profile.blocks_per_sm);
            let most = u64::from(fit) * u64::from(profile.sms);
            refuse_if(self.blocks() > most, CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)?;
        }
        Ok(())
    }

    fn queue(&self, stream: Ref<Stream>) -> Answer {
        let (named, profile) = (self.function.named, driver()?.profile());
        let (sms, ns) = profile.cost(named, self.blocks(), self.threads(), self.first);
        let position = push(stream, Work::Kernel { sms, ns }.capped(stream.context.sms()))?;
        if self.function.uses_memory() {
            vmm::use_address(stream, position, self.first.unwrap_or(0))?;
        }
        Ok(())
    }
}

task!(Launch, 0, |launch, stream| launch.queue(stream));

/// First argument of a launch as a 64-bit integer, for kernels with their duration as an argument.
unsafe fn first_argument(function: &Function, (params, extra): Arguments) -> Option<u64> {
    if function.named.duration != Duration::FirstArgument && !function.uses_memory() {
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

/// Spends the time of a launch call. A free kernel on an idle stream is then only counted.
#[inline(always)]
unsafe fn start(f: sys::CUfunction, geometry: Geometry, stream: StreamArg, arguments: Arguments) -> Answer {
    calls::launch();
    let free = Object::<Function>::get(f).is_ok_and(|function| function.free);
    if free && geometry.is_small() && !any_capture() && count_if_idle(stream) {
        return Ok(());
    }
    caught(CUresult::CUDA_ERROR_UNKNOWN, || launch(f, geometry, stream, arguments))
}

// The export has no guard: nothing panics on the free path, and the slow path has a guard of its own.
entry!(cuLaunchKernel, |f, gx, gy, gz, bx, by, bz, shared, stream, params, extra| {
    let geometry = Geometry { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: false };
    start(f, geometry, stream, (params, extra))
});

#[cold]
unsafe fn launch(f: sys::CUfunction, geometry: Geometry, stream: StreamArg, arguments: Arguments) -> Answer {
    if stream.1 as usize <= 2 || current_opt().is_none() {
        current()?;
    }
    let function = Object::<Function>::get(f)?;
    let stream = stream.find()?;
    let launch = Launch::new(function, geometry, arguments)?;
    legacy_not_implied(stream)?;
    submit(stream, launch)
}

entry!(cuLaunchKernelEx, |flavor, config: Given, f, kernelParams, extra| {
    let c = &*config;
    let (grid, block) = ([c.gridDimX, c.gridDimY, c.gridDimZ], [c.blockDimX, c.blockDimY, c.blockDimZ]);
    let cooperative = attribute_of::<u32>(c, COOPERATIVE).is_some_and(|value| value != 0);
    let geometry = Geometry { grid, block, shared: c.sharedMemBytes, cooperative };
    if c.numAttrs > 0 {
        cluster(c, Object::<Function>::get(f)?)?;
    }
    start(f, geometry, StreamArg(flavor, c.hStream), (kernelParams, extra))
});

entry!(cuLaunchCooperativeKernel, |f, gx, gy, gz, bx, by, bz, shared, stream, params| {
    calls::launch();
    let geometry = Geometry { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: true };
    launch(f, geometry, stream, (params, null_mut()))
});

entry!(cuLaunchCooperativeKernelMultiDevice, |launchParamsList, numDevices, _| {
    invalid_if(launchParamsList.is_null() || numDevices == 0)?;
    calls::launch();
    for i in 0..numDevices as usize {
        let p = &*launchParamsList.add(i);
        refuse_if(p.hStream as usize <= 2, INVALID_HANDLE)?;
        let (grid, block) = ([p.gridDimX, p.gridDimY, p.gridDimZ], [p.blockDimX, p.blockDimY, p.blockDimZ]);
        let geometry = Geometry { grid, block, shared: p.sharedMemBytes, cooperative: true };
        launch(p.function, geometry, StreamArg(Flavor::Legacy, p.hStream), (p.kernelParams, null_mut()))?;
    }
});

entry!(cuFuncSetBlockShape, |function: Function, x, y, z| {
    invalid_if(x <= 0 || y <= 0 || z <= 0)?;
    *lock(&function.block) = [x as u32, y as u32, z as u32];
});

entry!(cuLaunchGridAsync, |f, width, height, stream| {
    let block = *lock(&Object::<Function>::get(f)?.block);
    invalid_if(width <= 0 || height <= 0)?;
    calls::launch();
    let grid = [width as u32, height as u32, 1];
    let geometry = Geometry { grid, block, shared: 0, cooperative: false };
    launch(f, geometry, StreamArg(Flavor::Legacy, stream), (null_mut(), null_mut()))
});
alias!(cuLaunchGrid(f, width, height) = cuLaunchGridAsync(f, width, height, null_mut()));
alias!(cuLaunch(f) = cuLaunchGrid(f, 1, 1));

entry!(
    cuFuncSetSharedSize | cuParamSetSize | cuFuncSetCacheConfig | cuFuncSetSharedMemConfig,
    |_function: Function, _| ()
);

// --- Loading ---------------------------------------------------------------------------------------

/// The image at an address, for the calling thread's device.
unsafe fn read_image(image: *const c_void, lifetime: Lifetime) -> Res<Image> {
    invalid_if(image.is_null())?;
    let (major, minor) = current_profile()?.compute_capability;
    raw::image_at(image, major * 10 + minor, lifetime).ok_or(INVALID_IMAGE)
}

impl Module {
    /// A module is for one device and needs code for it. A library may have none.
    fn create(image: Image, is_library: bool) -> Res<Ref<Self>> {
        refuse_if(image.is_empty() && !is_library, NO_BINARY)?;
        Ok(Self::holding(image, is_library, false))
    }

    /// A library with a kernel of every name, for their time.
    fn for_time() -> Ref<Self> {
        Self::holding(Image::new(Vec::new(), true), true, true)
    }

    fn holding(image: Image, is_library: bool, for_time: bool) -> Ref<Self> {
        let (functions, globals) = (Mutex::default(), Mutex::default());
        Object::create(Self { image, is_library, for_time, functions, globals })
    }

    fn function(this: Ref<Self>, name: &CStr) -> Res<Ref<Function>> {
        let text = name.to_string_lossy().into_owned();
        let mut functions = lock(&this.functions);
        if let Some(function) = functions.get(&text) {
            return Ok(function);
        }
        let shape = match this.image.kernel(&text) {
            Found::No if this.image.is_empty() => return Err(NO_BINARY),
            Found::No => return Err(NOT_FOUND),
            Found::Yes(shape) => shape,
            Found::Unknown => Shape::default(),
        };
        let driver = driver()?;
        let named = driver.profile().named(&text);
        let attributes = [const { AtomicI32::new(0) }; 16];
        attributes[SHARED_MAX].store((48 << 10) - shape.shared.min(48 << 10) as i32, Relaxed);
        attributes[CARVEOUT].store(-1, Relaxed);
        let function = Object::create(Function {
            name: name.to_owned(),
            module: this,
            named,
            complete: this.for_time || values::only_takes_time(&text),
            free: named.duration == Duration::Fixed(0) && !VALUES.asked(),
            shape,
            attributes,
            block: Mutex::new([1, 1, 1]),
        });
        functions.insert(text, function);
        Ok(function)
    }

    /// Address and size of a global variable in the current context; the first request allocates its memory.
    fn global(&self, name: &str) -> Res<(u64, u64)> {
        let context = current()?;
        let key = (context.id, name.to_owned());
        let mut globals = lock(&self.globals);
        if let Some(found) = globals.get(&key) {
            return Ok((found.address, found.bytes));
        }
        let bytes = match self.image.global(name) {
            Found::Yes(bytes) => bytes,
            Found::Unknown => UNREADABLE_GLOBAL_BYTES,
            Found::No => return Err(NOT_FOUND),
        };
        let address = device_memory::allocate(context, bytes.max(1), MemKind::Plain)?;
        globals.insert(key, Global { context, address, bytes });
        Ok((address, bytes))
    }

    fn unload(this: Ref<Self>) -> Answer {
        refuse_if(!this.retire(), INVALID_HANDLE)?;
        for function in lock(&this.functions).values() {
            function.retire();
        }
        // A context which has ended has freed its memory.
        for global in std::mem::take(&mut *lock(&this.globals)).into_values() {
            if global.context.live() {
                device_memory::free_at_rest(global.address)?;
            }
        }
        Ok(())
    }
}

entry!(cuModuleLoadData | cuModuleLoadFatBinary, context, |module, image| {
    put(module, Module::create(read_image(image, Lifetime::Call)?, false)?.handle())
});
alias!(cuModuleLoadDataEx(module, image, _, _, _) = cuModuleLoadData(module, image));

unsafe fn read_file(path: *const c_char) -> Res<Vec<u8>> {
    let path = name_of(path)?.to_string_lossy().into_owned();
    std::fs::read(path).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)
}

unsafe fn image_of_file(path: *const c_char) -> Res<Image> {
    let mut bytes = read_file(path)?;
    bytes.extend([0; 4]);
    read_image(bytes.as_ptr().cast(), Lifetime::Call)
}

entry!(cuModuleLoad, context, |module, path| {
    put(module, Module::create(image_of_file(path)?, false)?.handle())
});

entry!(cuModuleUnload, context, |hmod: Module| Module::unload(hmod));

entry!(cuModuleGetLoadingMode, |mode| put(mode, 2));

unsafe fn name_of<'a>(name: *const c_char) -> Res<&'a CStr> {
    if name.is_null() { Err(INVALID_VALUE) } else { Ok(CStr::from_ptr(name)) }
}

entry!(cuModuleGetFunction | cuLibraryGetKernel, |function, module: Module, name| {
    put(function, Module::function(module, name_of(name)?)?.handle())
});

entry!(cuModuleGetFunctionCount | cuLibraryGetKernelCount, |count, module: Module| {
    let known = module.image.kernels().map(|names| names.len());
    put(count, known.unwrap_or_else(|| lock(&module.functions).len()) as u32)
});

entry!(cuModuleEnumerateFunctions | cuLibraryEnumerateKernels, |list, count, module: Module| {
    for name in module.image.kernels().into_iter().flatten() {
        let name = CString::new(name).map_err(|_| INVALID_VALUE)?;
        Module::function(module, &name)?;
    }
    for (i, function) in lock(&module.functions).values().take(count as usize).enumerate() {
        put(list.add(i), function.handle())?;
    }
});

entry!(cuModuleGetGlobal_v2 | cuLibraryGetGlobal, |dptr, bytes, hmod: Module, name| {
    let (address, size) = hmod.global(&name_of(name)?.to_string_lossy())?;
    put_opt(dptr, address);
    put_opt(bytes, size as usize);
});

entry!(cuLibraryLoadData, driver, |library, code, _, _, _, options, _, count| {
    /// `CU_LIBRARY_BINARY_IS_PRESERVED`: the program keeps the image until it unloads the library.
    const PRESERVED: c_uint = 1;
    let count = if options.is_null() { 0 } else { count as usize };
    let kept = (0..count).any(|i| options.add(i).read_unaligned() == PRESERVED);
    let lifetime = if kept { Lifetime::Kept } else { Lifetime::Call };
    put(library, Module::create(read_image(code, lifetime)?, true)?.handle())
});

entry!(cuLibraryLoadFromFile, driver, |library, path, _, _, _, _, _, _| {
    put(library, Module::create(image_of_file(path)?, true)?.handle())
});

entry!(cuLibraryUnload, driver, |library: Module| Module::unload(library));

entry!(cuLibraryGetModule, context, |pMod, library: Module| put(pMod, library.handle()));

entry!(cuKernelGetFunction, context, |pFunc, kernel: Function| put(pFunc, kernel.handle()));

entry!(cuKernelGetLibrary, |pLib, function: Function| {
    refuse_if(!function.module.is_library, INVALID_HANDLE)?;
    put(pLib, function.module.handle())
});

entry!(cuKernelGetName | cuFuncGetName, |name, hfunc: Function| put(name, hfunc.name.as_ptr()));

entry!(cuFuncGetModule, |hmod, hfunc: Function| put(hmod, hfunc.module.handle()));

entry!(cuFuncIsLoaded, |state, _function: Function| put(state, 1));

entry!(cuFuncLoad, |_function: Function| ());

// A kernel's attributes are the same on every device.
entry!(cuKernelGetAttribute, |pi, attrib, function: Function, _device: Device| {
    let (major, minor) = driver()?.profile().compute_capability;
    let value = match attrib {
        0 => function.shape.threads as i32,
        1 => function.shape.shared as i32,
        4 => 32,
        5 | 6 => (major * 10 + minor) as i32,
        2 | 3 | 7..=15 => function.attribute(attrib as usize),
        _ => return Err(INVALID_VALUE),
    };
    put(pi, value)
});
alias!(cuFuncGetAttribute(pi, attrib, function) = cuKernelGetAttribute(pi, attrib, function.cast(), 0));

entry!(cuKernelSetAttribute, |attrib, value, function: Function, _device: Device| {
    let most = driver()?.profile().shared_memory_per_sm_bytes as i32;
    let number = attrib as usize;
    let kept = match number {
        SHARED_MAX => invalid_if(value < 0 || value > most).map(|()| value)?,
        CARVEOUT => invalid_if(!(-1..=100).contains(&value)).map(|()| value)?,
        LARGE_CLUSTERS => (value != 0).into(),
        // Accepted, and not kept.
        10..=13 | 15 => 0,
        _ => return Err(INVALID_VALUE),
    };
    function.attributes[number].store(kept, Relaxed);
});
alias!(cuFuncSetAttribute(function, attrib, value) = cuKernelSetAttribute(attrib, value, function.cast(), 0));

entry!(cuKernelSetCacheConfig, |kernel, _, _dev: Device| Object::<Function>::get(kernel).map(drop));

/// For `gshare_sim`: the kernel of an operator or a collective whose values the package makes. 0, or a `CUresult`.
///
/// # Safety
/// `kernel` is writable, and `name` a string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gshare_sim_kernel(kernel: *mut sys::CUkernel, name: *const c_char) -> c_int {
    static ALL: OnceLock<Ref<Module>> = OnceLock::new();
    // SAFETY: by the contract.
    let made = guard(|| unsafe {
        put(kernel, Module::function(ALL.get_or_init(Module::for_time), name_of(name)?)?.handle())
    });
    made.0.cast_signed()
}

// --- Occupancy -------------------------------------------------------------------------------------

/// Shared memory reserved by the driver in each block, in bytes (`CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK`).
const RESERVED_SHARED: usize = 1 << 10;

fn blocks_per_sm(function: &Function, block: i32, dynamic: usize) -> Res<i32> {
    let profile = driver()?.profile();
    invalid_if(!(1..=1024).contains(&block))?;
    let shared = dynamic + function.shape.shared as usize;
    let by_threads = profile.threads_per_sm / (block as u32).next_multiple_of(32);
    // Each block takes a kilobyte for the driver beside its own shared memory.
    let by_shared = profile.shared_memory_per_sm_bytes as usize / (shared + RESERVED_SHARED);
    let by_shared = u32::try_from(by_shared).unwrap_or(u32::MAX);
    Ok(by_threads.min(profile.blocks_per_sm).min(by_shared) as i32)
}

entry!(cuOccupancyMaxActiveBlocksPerMultiprocessor, |blocks, function: Function, size, dynamic| put(
    blocks,
    blocks_per_sm(function, size, dynamic)?
));
alias!(
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, dynamic, _) =
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, dynamic)
);

// The block size with the best occupancy of an SM, and the number of such blocks in flight on the device.
entry!(cuOccupancyMaxPotentialBlockSize, |grid, block, function: Function, _, dynamic, limit| {
    let most = function.shape.threads as i32;
    let size = if (1..most).contains(&limit) { limit } else { most };
    let fit = blocks_per_sm(function, size, dynamic)?;
    put(grid, fit * current_profile()?.sms as i32)?;
    put(block, size)
});
alias!(
    cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, per_block, dynamic, limit, _) =
        cuOccupancyMaxPotentialBlockSize(grid, block, function, per_block, dynamic, limit)
);

entry!(cuOccupancyAvailableDynamicSMemPerBlock, |bytes, function: Function, blocks, size| {
    blocks_per_sm(function, size, 0)?;
    invalid_if(blocks <= 0)?;
    let part = driver()?.profile().shared_memory_per_sm_bytes as usize / blocks as usize;
    let part = part.saturating_sub(function.shape.shared as usize);
    put(bytes, part.min(function.attribute(SHARED_MAX).max(0) as usize))
});

/// Numbers of `CUlaunchAttributeID`.
const COOPERATIVE: u32 = 2;
const CLUSTER_DIMENSION: u32 = 4;

/// The value of a launch attribute; the last of several. Read as integers: a program may pass attributes newer than the bindings.
///
/// # Safety
/// `config` has its declared number of attributes, and the attribute's value begins with the integers of `T`.
unsafe fn attribute_of<T: Copy>(config: &sys::CUlaunchConfig, id: u32) -> Option<T> {
    let mut all = (0..config.numAttrs as usize).map(|i| config.attrs.add(i).cast::<u32>());
    // A number and a word of padding come before the value.
    all.rfind(|at| at.read_unaligned() == id).map(|at| at.add(2).cast::<T>().read_unaligned())
}

/// Blocks of a launch's cluster; 0 for no cluster. `CUDA_ERROR_INVALID_CLUSTER_SIZE` for too many blocks.
///
/// # Safety
/// `config` is readable, with its declared number of attributes.
unsafe fn cluster(config: &sys::CUlaunchConfig, function: &Function) -> Res<u32> {
    let dimensions = attribute_of::<[u32; 3]>(config, CLUSTER_DIMENSION);
    let blocks = dimensions.map_or(0, |by| by.into_iter().fold(1, u32::saturating_mul));
    if blocks > largest_cluster(function) { Err(CUresult(912)) } else { Ok(blocks) }
}

/// Blocks of the largest cluster: 8 on every device with clusters, 16 for a function which waives portability (CUDA C++ programming guide,
/// on thread block clusters).
fn largest_cluster(function: &Function) -> u32 {
    if function.attribute(LARGE_CLUSTERS) != 0 { 16 } else { 8 }
}

/// The profile of a device with clusters.
fn with_clusters() -> Res<&'static Profile> {
    current_profile().and_then(|p| if p.compute_capability.0 < 9 { Err(NOT_SUPPORTED) } else { Ok(p) })
}

entry!(cuOccupancyMaxPotentialClusterSize, |clusterSize, function: Function, config| {
    with_clusters()?;
    cluster(config.as_ref().ok_or(INVALID_VALUE)?, function)?;
    put(clusterSize, largest_cluster(function) as c_int)
});

// Clusters in flight at once. The blocks of a cluster run side by side on SMs of one group: an H100 and an H200 with 132 SMs had room for
// clusters of 3 to 8 blocks on 124 of them and for clusters of 16 on 116, with at most 8 blocks an SM.
entry!(cuOccupancyMaxActiveClusters, |numClusters, function: Function, config| {
    const BLOCKS_PER_SM: i32 = 8;
    let sms = with_clusters()?.sms;
    let config = config.as_ref().ok_or(INVALID_VALUE)?;
    let size = cluster(config, function)?;
    let threads = config.blockDimX.saturating_mul(config.blockDimY).saturating_mul(config.blockDimZ);
    let threads = i32::try_from(threads).unwrap_or(i32::MAX);
    let fit = blocks_per_sm(function, threads, config.sharedMemBytes as usize)?;
    let usable = match size {
        0..=2 => sms,
        3..=8 => sms - sms / 16,
        _ => sms - sms / 8,
    };
    let blocks = usable * fit.min(BLOCKS_PER_SM) as u32;
    put(numClusters, blocks.checked_div(size).unwrap_or(0) as c_int)
});

// --- The linker: inputs leave it as a container for the loader --------------------------------------

#[derive(Default)]
struct Link {
    inputs: Mutex<Vec<Vec<u8>>>,
    /// The image given to the program, which may read it until it destroys the link.
    image: Mutex<Vec<u8>>,
}

object!(Link, b"gshareLK");

entry!(cuLinkCreate_v2, context, |_, _, _, stateOut| put(stateOut, Object::create(Link::default()).handle()));

entry!(cuLinkAddData_v2, |link: Link, _, data: Given, size, _, _, _, _| {
    lock(&link.inputs).push(std::slice::from_raw_parts(data.cast::<u8>(), size).to_vec());
});

entry!(cuLinkAddFile_v2, |link: Link, _, path, _, _, _| lock(&link.inputs).push(read_file(path)?));

entry!(cuLinkComplete, |link: Link, cubinOut, sizeOut| {
    let inputs = lock(&link.inputs);
    let mut image = lock(&link.image);
    *image = container::of_inputs(inputs.iter().map(|bytes| (raw::input_kind(bytes), bytes.as_slice())));
    put(cubinOut, image.as_mut_ptr().cast())?;
    put_opt(sizeOut, image.len());
});

entry!(cuLinkDestroy, |link: Link| {
    link.retire();
});
