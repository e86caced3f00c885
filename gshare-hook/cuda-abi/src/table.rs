// Written by generate.py; do not edit. Releases read: 12.1, 12.4, 12.8, 12.9, 13.0, 13.2, 13.5.

/// The newest CUDA release with names in the table, as `1000 * major + 10 * minor`.
pub const NEWEST_RELEASE: u32 = 13050;

/// Calls `$callback!` with every row of the table; see the crate's documentation for the shape of a row.
#[macro_export]
macro_rules! cuda_symbols {
    ($callback:ident) => {
        $callback! {
            { 0 cuArray3DCreate "cuArray3DCreate" 2000 Legacy Array (pHandle: *mut sys::CUarray, pAllocateArray: *const c_void) }
            { 1 cuArray3DCreate_v2 "cuArray3DCreate" 3020 Legacy Array (pHandle: *mut sys::CUarray, pAllocateArray: *const sys::CUDA_ARRAY3D_DESCRIPTOR) }
            { 2 cuArray3DGetDescriptor "cuArray3DGetDescriptor" 2000 Legacy Array (pArrayDescriptor: *mut c_void, hArray: sys::CUarray) }
            { 3 cuArray3DGetDescriptor_v2 "cuArray3DGetDescriptor" 3020 Legacy Array (pArrayDescriptor: *mut sys::CUDA_ARRAY3D_DESCRIPTOR, hArray: sys::CUarray) }
            { 4 cuArrayCreate "cuArrayCreate" 2000 Legacy Array (pHandle: *mut sys::CUarray, pAllocateArray: *const c_void) }
            { 5 cuArrayCreate_v2 "cuArrayCreate" 3020 Legacy Array (pHandle: *mut sys::CUarray, pAllocateArray: *const sys::CUDA_ARRAY_DESCRIPTOR) }
            { 6 cuArrayDestroy "cuArrayDestroy" 2000 Legacy Array (hArray: sys::CUarray) }
            { 7 cuArrayGetDescriptor "cuArrayGetDescriptor" 2000 Legacy Array (pArrayDescriptor: *mut c_void, hArray: sys::CUarray) }
            { 8 cuArrayGetDescriptor_v2 "cuArrayGetDescriptor" 3020 Legacy Array (pArrayDescriptor: *mut sys::CUDA_ARRAY_DESCRIPTOR, hArray: sys::CUarray) }
            { 9 cuArrayGetMemoryRequirements "cuArrayGetMemoryRequirements" 11060 Legacy Array (memoryRequirements: *mut sys::CUDA_ARRAY_MEMORY_REQUIREMENTS, array: sys::CUarray, device: CUdevice) }
            { 10 cuArrayGetPlane "cuArrayGetPlane" 11020 Legacy Array (pPlaneArray: *mut sys::CUarray, hArray: sys::CUarray, planeIdx: c_uint) }
            { 11 cuArrayGetSparseProperties "cuArrayGetSparseProperties" 11010 Legacy Array (sparseProperties: *mut sys::CUDA_ARRAY_SPARSE_PROPERTIES, array: sys::CUarray) }
            { 12 cuCheckpointOperationComplete "cuCheckpointOperationComplete" 13040 Legacy Other (handle: sys::CUcheckpointOperationHandle) }
            { 13 cuCheckpointProcessCheckpoint "cuCheckpointProcessCheckpoint" 12080 Legacy Other (pid: c_int, args: *mut sys::CUcheckpointCheckpointArgs) }
            { 14 cuCheckpointProcessGetRestoreThreadId "cuCheckpointProcessGetRestoreThreadId" 12080 Legacy Other (pid: c_int, tid: *mut c_int) }
            { 15 cuCheckpointProcessGetState "cuCheckpointProcessGetState" 12080 Legacy Other (pid: c_int, state: *mut c_uint) }
            { 16 cuCheckpointProcessLock "cuCheckpointProcessLock" 12080 Legacy Other (pid: c_int, args: *mut sys::CUcheckpointLockArgs) }
            { 17 cuCheckpointProcessRestore "cuCheckpointProcessRestore" 12080 Legacy Other (pid: c_int, args: *mut sys::CUcheckpointRestoreArgs) }
            { 18 cuCheckpointProcessUnlock "cuCheckpointProcessUnlock" 12080 Legacy Other (pid: c_int, args: *mut sys::CUcheckpointUnlockArgs) }
            { 19 cuCoredumpDeregisterCompleteCallback "cuCoredumpDeregisterCompleteCallback" 13020 Legacy Other (callback: sys::CUcoredumpCallbackHandle) }
            { 20 cuCoredumpDeregisterStartCallback "cuCoredumpDeregisterStartCallback" 13020 Legacy Other (callback: sys::CUcoredumpCallbackHandle) }
            { 21 cuCoredumpGetAttribute "cuCoredumpGetAttribute" 12010 Legacy Other (attrib: c_uint, value: *mut c_void, size: *mut usize) }
            { 22 cuCoredumpGetAttributeGlobal "cuCoredumpGetAttributeGlobal" 12010 Legacy Other (attrib: c_uint, value: *mut c_void, size: *mut usize) }
            { 23 cuCoredumpRegisterCompleteCallback "cuCoredumpRegisterCompleteCallback" 13020 Legacy Other (callback: sys::CUcoredumpStatusCallback, userData: *mut c_void, callbackOut: *mut sys::CUcoredumpCallbackHandle) }
            { 24 cuCoredumpRegisterStartCallback "cuCoredumpRegisterStartCallback" 13020 Legacy Other (callback: sys::CUcoredumpStatusCallback, userData: *mut c_void, callbackOut: *mut sys::CUcoredumpCallbackHandle) }
            { 25 cuCoredumpSetAttribute "cuCoredumpSetAttribute" 12010 Legacy Other (attrib: c_uint, value: *mut c_void, size: *mut usize) }
            { 26 cuCoredumpSetAttributeGlobal "cuCoredumpSetAttributeGlobal" 12010 Legacy Other (attrib: c_uint, value: *mut c_void, size: *mut usize) }
            { 27 cuCtxAttach "cuCtxAttach" 2000 Legacy Context (pctx: *mut sys::CUcontext, flags: c_uint) }
            { 28 cuCtxCreate "cuCtxCreate" 2000 Legacy Context (pctx: *mut sys::CUcontext, flags: c_uint, dev: CUdevice) }
            { 29 cuCtxCreate_v2 "cuCtxCreate" 3020 Legacy Context (pctx: *mut sys::CUcontext, flags: c_uint, dev: CUdevice) }
            { 30 cuCtxCreate_v3 "cuCtxCreate" 11040 Legacy Context (pctx: *mut sys::CUcontext, paramsArray: *mut sys::CUexecAffinityParam, numParams: c_int, flags: c_uint, dev: CUdevice) }
            { 31 cuCtxCreate_v4 "cuCtxCreate" 12050 Legacy Context (pctx: *mut sys::CUcontext, ctxCreateParams: *mut sys::CUctxCreateParams, flags: c_uint, dev: CUdevice) }
            { 32 cuCtxDestroy "cuCtxDestroy" 2000 Legacy Context (ctx: sys::CUcontext) }
            { 33 cuCtxDestroy_v2 "cuCtxDestroy" 4000 Legacy Context (ctx: sys::CUcontext) }
            { 34 cuCtxDetach "cuCtxDetach" 2000 Legacy Context (ctx: sys::CUcontext) }
            { 35 cuCtxDisablePeerAccess "cuCtxDisablePeerAccess" 4000 Legacy Context (peerContext: sys::CUcontext) }
            { 36 cuCtxEnablePeerAccess "cuCtxEnablePeerAccess" 4000 Legacy Context (peerContext: sys::CUcontext, Flags: c_uint) }
            { 37 cuCtxFromGreenCtx "cuCtxFromGreenCtx" 12040 Legacy Context (pContext: *mut sys::CUcontext, hCtx: sys::CUgreenCtx) }
            { 38 cuCtxGetApiVersion "cuCtxGetApiVersion" 3020 Legacy Context (ctx: sys::CUcontext, version: *mut c_uint) }
            { 39 cuCtxGetCacheConfig "cuCtxGetCacheConfig" 3020 Legacy Context (pconfig: *mut c_uint) }
            { 40 cuCtxGetCurrent "cuCtxGetCurrent" 4000 Legacy Context (pctx: *mut sys::CUcontext) }
            { 41 cuCtxGetDevResource "cuCtxGetDevResource" 12040 Legacy Context (hCtx: sys::CUcontext, resource: *mut sys::CUdevResource, type_: c_uint) }
            { 42 cuCtxGetDevice "cuCtxGetDevice" 2000 Legacy Context (device: *mut CUdevice) }
            { 43 cuCtxGetDevice_v2 "cuCtxGetDevice" 13000 Legacy Context (device: *mut CUdevice, ctx: sys::CUcontext) }
            { 44 cuCtxGetExecAffinity "cuCtxGetExecAffinity" 11040 Legacy Context (pExecAffinity: *mut sys::CUexecAffinityParam, type_: c_uint) }
            { 45 cuCtxGetFlags "cuCtxGetFlags" 7000 Legacy Context (flags: *mut c_uint) }
            { 46 cuCtxGetId "cuCtxGetId" 12000 Legacy Context (ctx: sys::CUcontext, ctxId: *mut c_ulonglong) }
            { 47 cuCtxGetLimit "cuCtxGetLimit" 3010 Legacy Context (pvalue: *mut usize, limit: c_uint) }
            { 48 cuCtxGetSharedMemConfig "cuCtxGetSharedMemConfig" 4020 Legacy Context (pConfig: *mut c_uint) }
            { 49 cuCtxGetStreamPriorityRange "cuCtxGetStreamPriorityRange" 5050 Legacy Context (leastPriority: *mut c_int, greatestPriority: *mut c_int) }
            { 50 cuCtxPopCurrent "cuCtxPopCurrent" 2000 Legacy Context (pctx: *mut sys::CUcontext) }
            { 51 cuCtxPopCurrent_v2 "cuCtxPopCurrent" 4000 Legacy Context (pctx: *mut sys::CUcontext) }
            { 52 cuCtxPushCurrent "cuCtxPushCurrent" 2000 Legacy Context (ctx: sys::CUcontext) }
            { 53 cuCtxPushCurrent_v2 "cuCtxPushCurrent" 4000 Legacy Context (ctx: sys::CUcontext) }
            { 54 cuCtxRecordEvent "cuCtxRecordEvent" 12050 Legacy Sync (hCtx: sys::CUcontext, hEvent: sys::CUevent) }
            { 55 cuCtxResetPersistingL2Cache "cuCtxResetPersistingL2Cache" 11000 Legacy Context () }
            { 56 cuCtxSetCacheConfig "cuCtxSetCacheConfig" 3020 Legacy Context (config: c_uint) }
            { 57 cuCtxSetCurrent "cuCtxSetCurrent" 4000 Legacy Context (ctx: sys::CUcontext) }
            { 58 cuCtxSetFlags "cuCtxSetFlags" 12010 Legacy Context (flags: c_uint) }
            { 59 cuCtxSetLimit "cuCtxSetLimit" 3010 Legacy Context (limit: c_uint, value: usize) }
            { 60 cuCtxSetSharedMemConfig "cuCtxSetSharedMemConfig" 4020 Legacy Context (config: c_uint) }
            { 61 cuCtxSynchronize "cuCtxSynchronize" 2000 Legacy Sync () }
            { 62 cuCtxSynchronize_v2 "cuCtxSynchronize" 13000 Legacy Sync (ctx: sys::CUcontext) }
            { 63 cuCtxWaitEvent "cuCtxWaitEvent" 12050 Legacy Sync (hCtx: sys::CUcontext, hEvent: sys::CUevent) }
            { 64 cuDestroyExternalMemory "cuDestroyExternalMemory" 10000 Legacy Ipc (extMem: sys::CUexternalMemory) }
            { 65 cuDestroyExternalSemaphore "cuDestroyExternalSemaphore" 10000 Legacy Ipc (extSem: sys::CUexternalSemaphore) }
            { 66 cuDevResourceGenerateDesc "cuDevResourceGenerateDesc" 12040 Legacy Context (phDesc: *mut sys::CUdevResourceDesc, resources: *mut sys::CUdevResource, nbResources: c_uint) }
            { 67 cuDevSmResourceSplit "cuDevSmResourceSplit" 13010 Legacy Context (result: *mut sys::CUdevResource, nbGroups: c_uint, input: *const sys::CUdevResource, remainder: *mut sys::CUdevResource, flags: c_uint, groupParams: *mut sys::CU_DEV_SM_RESOURCE_GROUP_PARAMS) }
            { 68 cuDevSmResourceSplitByCount "cuDevSmResourceSplitByCount" 12040 Legacy Context (result: *mut sys::CUdevResource, nbGroups: *mut c_uint, input: *const sys::CUdevResource, remainder: *mut sys::CUdevResource, flags: c_uint, minCount: c_uint) }
            { 69 cuDeviceCanAccessPeer "cuDeviceCanAccessPeer" 4000 Legacy Other (canAccessPeer: *mut c_int, dev: CUdevice, peerDev: CUdevice) }
            { 70 cuDeviceComputeCapability "cuDeviceComputeCapability" 2000 Legacy Info (major: *mut c_int, minor: *mut c_int, dev: CUdevice) }
            { 71 cuDeviceGet "cuDeviceGet" 2000 Legacy Info (device: *mut CUdevice, ordinal: c_int) }
            { 72 cuDeviceGetAttribute "cuDeviceGetAttribute" 2000 Legacy Info (pi: *mut c_int, attrib: c_uint, dev: CUdevice) }
            { 73 cuDeviceGetByPCIBusId "cuDeviceGetByPCIBusId" 4010 Legacy Info (dev: *mut CUdevice, pciBusId: *const c_char) }
            { 74 cuDeviceGetCliqueCount "cuDeviceGetCliqueCount" 13040 Legacy Info (count: *mut usize, dev: CUdevice) }
            { 75 cuDeviceGetCliqueInfo "cuDeviceGetCliqueInfo" 13040 Legacy Info (cliqueInfo: *mut sys::CUcliqueInfo, count: *mut usize, dev: CUdevice) }
            { 76 cuDeviceGetCount "cuDeviceGetCount" 2000 Legacy Info (count: *mut c_int) }
            { 77 cuDeviceGetDefaultMemPool "cuDeviceGetDefaultMemPool" 11020 Legacy Pool (pool_out: *mut sys::CUmemoryPool, dev: CUdevice) }
            { 78 cuDeviceGetDevResource "cuDeviceGetDevResource" 12040 Legacy Info (device: CUdevice, resource: *mut sys::CUdevResource, type_: c_uint) }
            { 79 cuDeviceGetExecAffinitySupport "cuDeviceGetExecAffinitySupport" 11040 Legacy Info (pi: *mut c_int, type_: c_uint, dev: CUdevice) }
            { 80 cuDeviceGetFabricClusterUuid "cuDeviceGetFabricClusterUuid" 13040 Legacy Info (uuid: *mut sys::CUuuid, dev: CUdevice) }
            { 81 cuDeviceGetGraphMemAttribute "cuDeviceGetGraphMemAttribute" 11040 Legacy Graph (device: CUdevice, attr: c_uint, value: *mut c_void) }
            { 82 cuDeviceGetHostAtomicCapabilities "cuDeviceGetHostAtomicCapabilities" 13000 Legacy Info (capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, dev: CUdevice) }
            { 83 cuDeviceGetLuid "cuDeviceGetLuid" 10000 Legacy Info (luid: *mut c_char, deviceNodeMask: *mut c_uint, dev: CUdevice) }
            { 84 cuDeviceGetMemPool "cuDeviceGetMemPool" 11020 Legacy Pool (pool: *mut sys::CUmemoryPool, dev: CUdevice) }
            { 85 cuDeviceGetName "cuDeviceGetName" 2000 Legacy Info (name: *mut c_char, len: c_int, dev: CUdevice) }
            { 86 cuDeviceGetNvSciSyncAttributes "cuDeviceGetNvSciSyncAttributes" 10020 Legacy Info (nvSciSyncAttrList: *mut c_void, dev: CUdevice, flags: c_int) }
            { 87 cuDeviceGetP2PAtomicCapabilities "cuDeviceGetP2PAtomicCapabilities" 13000 Legacy Info (capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, srcDevice: CUdevice, dstDevice: CUdevice) }
            { 88 cuDeviceGetP2PAttribute "cuDeviceGetP2PAttribute" 8000 Legacy Info (value: *mut c_int, attrib: c_uint, srcDevice: CUdevice, dstDevice: CUdevice) }
            { 89 cuDeviceGetPCIBusId "cuDeviceGetPCIBusId" 4010 Legacy Info (pciBusId: *mut c_char, len: c_int, dev: CUdevice) }
            { 90 cuDeviceGetProperties "cuDeviceGetProperties" 2000 Legacy Info (prop: *mut sys::CUdevprop, dev: CUdevice) }
            { 91 cuDeviceGetTexture1DLinearMaxWidth "cuDeviceGetTexture1DLinearMaxWidth" 11010 Legacy Info (maxWidthInElements: *mut usize, format: c_uint, numChannels: c_uint, dev: CUdevice) }
            { 92 cuDeviceGetUuid "cuDeviceGetUuid" 9020 Legacy Info (uuid: *mut sys::CUuuid, dev: CUdevice) }
            { 93 cuDeviceGetUuid_v2 "cuDeviceGetUuid" 11040 Legacy Info (uuid: *mut sys::CUuuid, dev: CUdevice) }
            { 94 cuDeviceGraphMemTrim "cuDeviceGraphMemTrim" 11040 Legacy Graph (device: CUdevice) }
            { 95 cuDevicePrimaryCtxGetState "cuDevicePrimaryCtxGetState" 7000 Legacy Context (dev: CUdevice, flags: *mut c_uint, active: *mut c_int) }
            { 96 cuDevicePrimaryCtxRelease "cuDevicePrimaryCtxRelease" 7000 Legacy Context (dev: CUdevice) }
            { 97 cuDevicePrimaryCtxRelease_v2 "cuDevicePrimaryCtxRelease" 11000 Legacy Context (dev: CUdevice) }
            { 98 cuDevicePrimaryCtxReset "cuDevicePrimaryCtxReset" 7000 Legacy Context (dev: CUdevice) }
            { 99 cuDevicePrimaryCtxReset_v2 "cuDevicePrimaryCtxReset" 11000 Legacy Context (dev: CUdevice) }
            { 100 cuDevicePrimaryCtxRetain "cuDevicePrimaryCtxRetain" 7000 Legacy Context (pctx: *mut sys::CUcontext, dev: CUdevice) }
            { 101 cuDevicePrimaryCtxSetFlags "cuDevicePrimaryCtxSetFlags" 7000 Legacy Context (dev: CUdevice, flags: c_uint) }
            { 102 cuDevicePrimaryCtxSetFlags_v2 "cuDevicePrimaryCtxSetFlags" 11000 Legacy Context (dev: CUdevice, flags: c_uint) }
            { 103 cuDeviceRegisterAsyncNotification "cuDeviceRegisterAsyncNotification" 12040 Legacy Other (device: CUdevice, callbackFunc: sys::CUasyncCallback, userData: *mut c_void, callback: *mut sys::CUasyncCallbackHandle) }
            { 104 cuDeviceSetGraphMemAttribute "cuDeviceSetGraphMemAttribute" 11040 Legacy Graph (device: CUdevice, attr: c_uint, value: *mut c_void) }
            { 105 cuDeviceSetMemPool "cuDeviceSetMemPool" 11020 Legacy Pool (dev: CUdevice, pool: sys::CUmemoryPool) }
            { 106 cuDeviceTotalMem "cuDeviceTotalMem" 2000 Legacy Info (bytes: *mut c_uint, dev: CUdevice) }
            { 107 cuDeviceTotalMem_v2 "cuDeviceTotalMem" 3020 Legacy Info (bytes: *mut usize, dev: CUdevice) }
            { 108 cuDeviceUnregisterAsyncNotification "cuDeviceUnregisterAsyncNotification" 12040 Legacy Other (device: CUdevice, callback: sys::CUasyncCallbackHandle) }
            { 109 cuDriverGetVersion "cuDriverGetVersion" 2020 Legacy Info (driverVersion: *mut c_int) }
            { 110 cuEGLStreamConsumerAcquireFrame "cuEGLStreamConsumerAcquireFrame" 7000 Legacy Ipc (conn: *mut *mut c_void, pCudaResource: *mut sys::CUgraphicsResource, pStream: *mut sys::CUstream, timeout: c_uint) }
            { 111 cuEGLStreamConsumerConnect "cuEGLStreamConsumerConnect" 7000 Legacy Ipc (conn: *mut *mut c_void, stream: *mut c_void) }
            { 112 cuEGLStreamConsumerConnectWithFlags "cuEGLStreamConsumerConnectWithFlags" 8000 Legacy Ipc (conn: *mut *mut c_void, stream: *mut c_void, flags: c_uint) }
            { 113 cuEGLStreamConsumerDisconnect "cuEGLStreamConsumerDisconnect" 7000 Legacy Ipc (conn: *mut *mut c_void) }
            { 114 cuEGLStreamConsumerReleaseFrame "cuEGLStreamConsumerReleaseFrame" 7000 Legacy Ipc (conn: *mut *mut c_void, pCudaResource: sys::CUgraphicsResource, pStream: *mut sys::CUstream) }
            { 115 cuEGLStreamProducerConnect "cuEGLStreamProducerConnect" 7000 Legacy Ipc (conn: *mut *mut c_void, stream: *mut c_void, width: i32, height: i32) }
            { 116 cuEGLStreamProducerDisconnect "cuEGLStreamProducerDisconnect" 7000 Legacy Ipc (conn: *mut *mut c_void) }
            { 117 cuEGLStreamProducerPresentFrame "cuEGLStreamProducerPresentFrame" 7000 Legacy Ipc (conn: *mut *mut c_void, eglframe: c_void, pStream: *mut sys::CUstream) }
            { 118 cuEGLStreamProducerReturnFrame "cuEGLStreamProducerReturnFrame" 7000 Legacy Ipc (conn: *mut *mut c_void, eglframe: *mut c_void, pStream: *mut sys::CUstream) }
            { 119 cuEventCreate "cuEventCreate" 2000 Legacy Other (phEvent: *mut sys::CUevent, Flags: c_uint) }
            { 120 cuEventCreateFromEGLSync "cuEventCreateFromEGLSync" 9000 Legacy Other (phEvent: *mut sys::CUevent, eglSync: *mut c_void, flags: c_uint) }
            { 121 cuEventDestroy "cuEventDestroy" 2000 Legacy Other (hEvent: sys::CUevent) }
            { 122 cuEventDestroy_v2 "cuEventDestroy" 4000 Legacy Other (hEvent: sys::CUevent) }
            { 123 cuEventElapsedTime "cuEventElapsedTime" 2000 Legacy Other (pMilliseconds: *mut f32, hStart: sys::CUevent, hEnd: sys::CUevent) }
            { 124 cuEventElapsedTime_v2 "cuEventElapsedTime" 12080 Legacy Other (pMilliseconds: *mut f32, hStart: sys::CUevent, hEnd: sys::CUevent) }
            { 125 cuEventQuery "cuEventQuery" 2000 Legacy Sync (hEvent: sys::CUevent) }
            { 126 cuEventRecord "cuEventRecord" 2000 Legacy Sync (hEvent: sys::CUevent, hStream: sys::CUstream) }
            { 127 cuEventRecord_ptsz "cuEventRecord" 7000 PerThread Sync (hEvent: sys::CUevent, hStream: sys::CUstream) }
            { 128 cuEventRecordWithFlags "cuEventRecordWithFlags" 11010 Legacy Sync (hEvent: sys::CUevent, hStream: sys::CUstream, flags: c_uint) }
            { 129 cuEventRecordWithFlags_ptsz "cuEventRecordWithFlags" 11010 PerThread Sync (hEvent: sys::CUevent, hStream: sys::CUstream, flags: c_uint) }
            { 130 cuEventSynchronize "cuEventSynchronize" 2000 Legacy Sync (hEvent: sys::CUevent) }
            { 131 cuExternalMemoryGetMappedBuffer "cuExternalMemoryGetMappedBuffer" 10000 Legacy Ipc (devPtr: *mut CUdeviceptr, extMem: sys::CUexternalMemory, bufferDesc: *const sys::CUDA_EXTERNAL_MEMORY_BUFFER_DESC) }
            { 132 cuExternalMemoryGetMappedMipmappedArray "cuExternalMemoryGetMappedMipmappedArray" 10000 Legacy Ipc (mipmap: *mut sys::CUmipmappedArray, extMem: sys::CUexternalMemory, mipmapDesc: *const sys::CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC) }
            { 133 cuFabricCpyBatchAsync "cuFabricCpyBatchAsync" 13050 Legacy Copy (numOps: usize, opList: *mut c_void, flags: c_ulonglong, hStream: sys::CUstream) }
            { 134 cuFabricCpyBatchAsync_ptsz "cuFabricCpyBatchAsync" 13050 PerThread Copy (numOps: usize, opList: *mut c_void, flags: c_ulonglong, hStream: sys::CUstream) }
            { 135 cuFlushGPUDirectRDMAWrites "cuFlushGPUDirectRDMAWrites" 11030 Legacy Other (target: c_uint, scope: c_uint) }
            { 136 cuFuncGetAttribute "cuFuncGetAttribute" 2020 Legacy Other (pi: *mut c_int, attrib: c_uint, hfunc: sys::CUfunction) }
            { 137 cuFuncGetModule "cuFuncGetModule" 11000 Legacy Other (hmod: *mut sys::CUmodule, hfunc: sys::CUfunction) }
            { 138 cuFuncGetName "cuFuncGetName" 12030 Legacy Other (name: *mut *const c_char, hfunc: sys::CUfunction) }
            { 139 cuFuncGetParamCount "cuFuncGetParamCount" 13020 Legacy Other (func: sys::CUfunction, paramCount: *mut usize) }
            { 140 cuFuncGetParamInfo "cuFuncGetParamInfo" 12040 Legacy Other (func: sys::CUfunction, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) }
            { 141 cuFuncIsLoaded "cuFuncIsLoaded" 12040 Legacy Other (state: *mut c_uint, function: sys::CUfunction) }
            { 142 cuFuncLoad "cuFuncLoad" 12040 Legacy Other (function: sys::CUfunction) }
            { 143 cuFuncSetAttribute "cuFuncSetAttribute" 9000 Legacy Other (hfunc: sys::CUfunction, attrib: c_uint, value: c_int) }
            { 144 cuFuncSetBlockShape "cuFuncSetBlockShape" 2000 Legacy Other (hfunc: sys::CUfunction, x: c_int, y: c_int, z: c_int) }
            { 145 cuFuncSetCacheConfig "cuFuncSetCacheConfig" 3000 Legacy Other (hfunc: sys::CUfunction, config: c_uint) }
            { 146 cuFuncSetSharedMemConfig "cuFuncSetSharedMemConfig" 4020 Legacy Other (hfunc: sys::CUfunction, config: c_uint) }
            { 147 cuFuncSetSharedSize "cuFuncSetSharedSize" 2000 Legacy Other (hfunc: sys::CUfunction, bytes: c_uint) }
            { 148 cuGLCtxCreate "cuGLCtxCreate" 2000 Legacy Ipc (pCtx: *mut sys::CUcontext, Flags: c_uint, device: CUdevice) }
            { 149 cuGLCtxCreate_v2 "cuGLCtxCreate" 3020 Legacy Ipc (pCtx: *mut sys::CUcontext, Flags: c_uint, device: CUdevice) }
            { 150 cuGLGetDevices "cuGLGetDevices" 4010 Legacy Ipc (pCudaDeviceCount: *mut c_uint, pCudaDevices: *mut CUdevice, cudaDeviceCount: c_uint, deviceList: c_uint) }
            { 151 cuGLGetDevices_v2 "cuGLGetDevices" 6050 Legacy Ipc (pCudaDeviceCount: *mut c_uint, pCudaDevices: *mut CUdevice, cudaDeviceCount: c_uint, deviceList: c_uint) }
            { 152 cuGLInit "cuGLInit" 2000 Legacy Ipc () }
            { 153 cuGLMapBufferObject "cuGLMapBufferObject" 2000 Legacy Ipc (dptr: *mut c_uint, size: *mut c_uint, buffer: c_uint) }
            { 154 cuGLMapBufferObject_v2 "cuGLMapBufferObject" 3020 Legacy Ipc (dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint) }
            { 155 cuGLMapBufferObject_v2_ptds "cuGLMapBufferObject" 7000 PerThread Ipc (dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint) }
            { 156 cuGLMapBufferObjectAsync "cuGLMapBufferObjectAsync" 2030 Legacy Ipc (dptr: *mut c_uint, size: *mut c_uint, buffer: c_uint, hStream: sys::CUstream) }
            { 157 cuGLMapBufferObjectAsync_v2 "cuGLMapBufferObjectAsync" 3020 Legacy Ipc (dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint, hStream: sys::CUstream) }
            { 158 cuGLMapBufferObjectAsync_v2_ptsz "cuGLMapBufferObjectAsync" 7000 PerThread Ipc (dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint, hStream: sys::CUstream) }
            { 159 cuGLRegisterBufferObject "cuGLRegisterBufferObject" 2000 Legacy Ipc (buffer: c_uint) }
            { 160 cuGLSetBufferObjectMapFlags "cuGLSetBufferObjectMapFlags" 2030 Legacy Ipc (buffer: c_uint, Flags: c_uint) }
            { 161 cuGLUnmapBufferObject "cuGLUnmapBufferObject" 2000 Legacy Ipc (buffer: c_uint) }
            { 162 cuGLUnmapBufferObjectAsync "cuGLUnmapBufferObjectAsync" 2030 Legacy Ipc (buffer: c_uint, hStream: sys::CUstream) }
            { 163 cuGLUnregisterBufferObject "cuGLUnregisterBufferObject" 2000 Legacy Ipc (buffer: c_uint) }
            { 164 cuGetErrorName "cuGetErrorName" 6000 Legacy Other (error: CUresult, pStr: *mut *const c_char) }
            { 165 cuGetErrorString "cuGetErrorString" 6000 Legacy Other (error: CUresult, pStr: *mut *const c_char) }
            { 166 cuGetExportTable "cuGetExportTable" 3000 Legacy Other (ppExportTable: *mut *const c_void, pExportTableId: *const sys::CUuuid) }
            { 167 cuGetProcAddress "cuGetProcAddress" 11030 Legacy Other (symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: u64) }
            { 168 cuGetProcAddress_v2 "cuGetProcAddress" 12000 Legacy Other (symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: u64, symbolStatus: *mut c_uint) }
            { 169 cuGraphAddBatchMemOpNode "cuGraphAddBatchMemOpNode" 11070 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS) }
            { 170 cuGraphAddChildGraphNode "cuGraphAddChildGraphNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, childGraph: sys::CUgraph) }
            { 171 cuGraphAddDependencies "cuGraphAddDependencies" 10000 Legacy Graph (hGraph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, numDependencies: usize) }
            { 172 cuGraphAddDependencies_v2 "cuGraphAddDependencies" 12030 Legacy Graph (hGraph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, edgeData: *const sys::CUgraphEdgeData, numDependencies: usize) }
            { 173 cuGraphAddEmptyNode "cuGraphAddEmptyNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize) }
            { 174 cuGraphAddEventRecordNode "cuGraphAddEventRecordNode" 11010 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, event: sys::CUevent) }
            { 175 cuGraphAddEventWaitNode "cuGraphAddEventWaitNode" 11010 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, event: sys::CUevent) }
            { 176 cuGraphAddExternalSemaphoresSignalNode "cuGraphAddExternalSemaphoresSignalNode" 11020 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_EXT_SEM_SIGNAL_NODE_PARAMS) }
            { 177 cuGraphAddExternalSemaphoresWaitNode "cuGraphAddExternalSemaphoresWaitNode" 11020 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_EXT_SEM_WAIT_NODE_PARAMS) }
            { 178 cuGraphAddHostNode "cuGraphAddHostNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_HOST_NODE_PARAMS) }
            { 179 cuGraphAddKernelNode "cuGraphAddKernelNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) }
            { 180 cuGraphAddKernelNode_v2 "cuGraphAddKernelNode" 12000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS) }
            { 181 cuGraphAddMemAllocNode "cuGraphAddMemAllocNode" 11040 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS) }
            { 182 cuGraphAddMemFreeNode "cuGraphAddMemFreeNode" 11040 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, dptr: CUdeviceptr) }
            { 183 cuGraphAddMemcpyNode "cuGraphAddMemcpyNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, copyParams: *const sys::CUDA_MEMCPY3D, ctx: sys::CUcontext) }
            { 184 cuGraphAddMemsetNode "cuGraphAddMemsetNode" 10000 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, memsetParams: *const sys::CUDA_MEMSET_NODE_PARAMS, ctx: sys::CUcontext) }
            { 185 cuGraphAddNode "cuGraphAddNode" 12020 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, numDependencies: usize, nodeParams: *mut sys::CUgraphNodeParams) }
            { 186 cuGraphAddNode_v2 "cuGraphAddNode" 12030 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, nodeParams: *mut sys::CUgraphNodeParams) }
            { 187 cuGraphAddNode_v3 "cuGraphAddNode" 13040 Legacy Graph (phGraphNode: *mut sys::CUgraphNode, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, nodeParams: *mut sys::CUgraphNodeParams) }
            { 188 cuGraphBatchMemOpNodeGetParams "cuGraphBatchMemOpNodeGetParams" 11070 Legacy Graph (hNode: sys::CUgraphNode, nodeParams_out: *mut sys::CUDA_BATCH_MEM_OP_NODE_PARAMS) }
            { 189 cuGraphBatchMemOpNodeSetParams "cuGraphBatchMemOpNodeSetParams" 11070 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS) }
            { 190 cuGraphChildGraphNodeGetGraph "cuGraphChildGraphNodeGetGraph" 10000 Legacy Graph (hNode: sys::CUgraphNode, phGraph: *mut sys::CUgraph) }
            { 191 cuGraphClone "cuGraphClone" 10000 Legacy Graph (phGraphClone: *mut sys::CUgraph, originalGraph: sys::CUgraph) }
            { 192 cuGraphConditionalHandleCreate "cuGraphConditionalHandleCreate" 12030 Legacy Graph (pHandle_out: *mut sys::CUgraphConditionalHandle, hGraph: sys::CUgraph, ctx: sys::CUcontext, defaultLaunchValue: c_uint, flags: c_uint) }
            { 193 cuGraphCreate "cuGraphCreate" 10000 Legacy Graph (phGraph: *mut sys::CUgraph, flags: c_uint) }
            { 194 cuGraphDebugDotPrint "cuGraphDebugDotPrint" 11030 Legacy Graph (hGraph: sys::CUgraph, path: *const c_char, flags: c_uint) }
            { 195 cuGraphDestroy "cuGraphDestroy" 10000 Legacy Graph (hGraph: sys::CUgraph) }
            { 196 cuGraphDestroyNode "cuGraphDestroyNode" 10000 Legacy Graph (hNode: sys::CUgraphNode) }
            { 197 cuGraphEventRecordNodeGetEvent "cuGraphEventRecordNodeGetEvent" 11010 Legacy Graph (hNode: sys::CUgraphNode, event_out: *mut sys::CUevent) }
            { 198 cuGraphEventRecordNodeSetEvent "cuGraphEventRecordNodeSetEvent" 11010 Legacy Graph (hNode: sys::CUgraphNode, event: sys::CUevent) }
            { 199 cuGraphEventWaitNodeGetEvent "cuGraphEventWaitNodeGetEvent" 11010 Legacy Graph (hNode: sys::CUgraphNode, event_out: *mut sys::CUevent) }
            { 200 cuGraphEventWaitNodeSetEvent "cuGraphEventWaitNodeSetEvent" 11010 Legacy Graph (hNode: sys::CUgraphNode, event: sys::CUevent) }
            { 201 cuGraphExecBatchMemOpNodeSetParams "cuGraphExecBatchMemOpNodeSetParams" 11070 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS) }
            { 202 cuGraphExecChildGraphNodeSetParams "cuGraphExecChildGraphNodeSetParams" 11010 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, childGraph: sys::CUgraph) }
            { 203 cuGraphExecDestroy "cuGraphExecDestroy" 10000 Legacy Graph (hGraphExec: sys::CUgraphExec) }
            { 204 cuGraphExecEventRecordNodeSetEvent "cuGraphExecEventRecordNodeSetEvent" 11010 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, event: sys::CUevent) }
            { 205 cuGraphExecEventWaitNodeSetEvent "cuGraphExecEventWaitNodeSetEvent" 11010 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, event: sys::CUevent) }
            { 206 cuGraphExecExternalSemaphoresSignalNodeSetParams "cuGraphExecExternalSemaphoresSignalNodeSetParams" 11020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_EXT_SEM_SIGNAL_NODE_PARAMS) }
            { 207 cuGraphExecExternalSemaphoresWaitNodeSetParams "cuGraphExecExternalSemaphoresWaitNodeSetParams" 11020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_EXT_SEM_WAIT_NODE_PARAMS) }
            { 208 cuGraphExecGetFlags "cuGraphExecGetFlags" 12000 Legacy Graph (hGraphExec: sys::CUgraphExec, flags: *mut u64) }
            { 209 cuGraphExecGetId "cuGraphExecGetId" 13010 Legacy Graph (hGraphExec: sys::CUgraphExec, graphId: *mut c_uint) }
            { 210 cuGraphExecHostNodeSetParams "cuGraphExecHostNodeSetParams" 10020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_HOST_NODE_PARAMS) }
            { 211 cuGraphExecKernelNodeSetParams "cuGraphExecKernelNodeSetParams" 10010 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) }
            { 212 cuGraphExecKernelNodeSetParams_v2 "cuGraphExecKernelNodeSetParams" 12000 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS) }
            { 213 cuGraphExecMemcpyNodeSetParams "cuGraphExecMemcpyNodeSetParams" 10020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, copyParams: *const sys::CUDA_MEMCPY3D, ctx: sys::CUcontext) }
            { 214 cuGraphExecMemsetNodeSetParams "cuGraphExecMemsetNodeSetParams" 10020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, memsetParams: *const sys::CUDA_MEMSET_NODE_PARAMS, ctx: sys::CUcontext) }
            { 215 cuGraphExecNodeSetParams "cuGraphExecNodeSetParams" 12020 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, nodeParams: *mut sys::CUgraphNodeParams) }
            { 216 cuGraphExecUpdate "cuGraphExecUpdate" 10020 Legacy Graph (hGraphExec: sys::CUgraphExec, hGraph: sys::CUgraph, hErrorNode_out: *mut sys::CUgraphNode, updateResult_out: *mut c_uint) }
            { 217 cuGraphExecUpdate_v2 "cuGraphExecUpdate" 12000 Legacy Graph (hGraphExec: sys::CUgraphExec, hGraph: sys::CUgraph, resultInfo: *mut sys::CUgraphExecUpdateResultInfo) }
            { 218 cuGraphExternalSemaphoresSignalNodeGetParams "cuGraphExternalSemaphoresSignalNodeGetParams" 11020 Legacy Graph (hNode: sys::CUgraphNode, params_out: *mut sys::CUDA_EXT_SEM_SIGNAL_NODE_PARAMS) }
            { 219 cuGraphExternalSemaphoresSignalNodeSetParams "cuGraphExternalSemaphoresSignalNodeSetParams" 11020 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_EXT_SEM_SIGNAL_NODE_PARAMS) }
            { 220 cuGraphExternalSemaphoresWaitNodeGetParams "cuGraphExternalSemaphoresWaitNodeGetParams" 11020 Legacy Graph (hNode: sys::CUgraphNode, params_out: *mut sys::CUDA_EXT_SEM_WAIT_NODE_PARAMS) }
            { 221 cuGraphExternalSemaphoresWaitNodeSetParams "cuGraphExternalSemaphoresWaitNodeSetParams" 11020 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_EXT_SEM_WAIT_NODE_PARAMS) }
            { 222 cuGraphGetEdges "cuGraphGetEdges" 10000 Legacy Graph (hGraph: sys::CUgraph, from: *mut sys::CUgraphNode, to: *mut sys::CUgraphNode, numEdges: *mut usize) }
            { 223 cuGraphGetEdges_v2 "cuGraphGetEdges" 12030 Legacy Graph (hGraph: sys::CUgraph, from: *mut sys::CUgraphNode, to: *mut sys::CUgraphNode, edgeData: *mut sys::CUgraphEdgeData, numEdges: *mut usize) }
            { 224 cuGraphGetId "cuGraphGetId" 13010 Legacy Graph (hGraph: sys::CUgraph, graphId: *mut c_uint) }
            { 225 cuGraphGetNodes "cuGraphGetNodes" 10000 Legacy Graph (hGraph: sys::CUgraph, nodes: *mut sys::CUgraphNode, numNodes: *mut usize) }
            { 226 cuGraphGetRootNodes "cuGraphGetRootNodes" 10000 Legacy Graph (hGraph: sys::CUgraph, rootNodes: *mut sys::CUgraphNode, numRootNodes: *mut usize) }
            { 227 cuGraphHostNodeGetParams "cuGraphHostNodeGetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUDA_HOST_NODE_PARAMS) }
            { 228 cuGraphHostNodeSetParams "cuGraphHostNodeSetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_HOST_NODE_PARAMS) }
            { 229 cuGraphInstantiate "cuGraphInstantiate" 10000 Legacy Graph (phGraphExec: *mut sys::CUgraphExec, hGraph: sys::CUgraph, phErrorNode: *mut sys::CUgraphNode, logBuffer: *mut c_char, bufferSize: usize) }
            { 230 cuGraphInstantiate_v2 "cuGraphInstantiate" 11000 Legacy Graph (phGraphExec: *mut sys::CUgraphExec, hGraph: sys::CUgraph, phErrorNode: *mut sys::CUgraphNode, logBuffer: *mut c_char, bufferSize: usize) }
            { 231 cuGraphInstantiateWithFlags "cuGraphInstantiateWithFlags" 11040 Legacy Graph (phGraphExec: *mut sys::CUgraphExec, hGraph: sys::CUgraph, flags: c_ulonglong) }
            { 232 cuGraphInstantiateWithParams "cuGraphInstantiateWithParams" 12000 Legacy Graph (phGraphExec: *mut sys::CUgraphExec, hGraph: sys::CUgraph, instantiateParams: *mut sys::CUDA_GRAPH_INSTANTIATE_PARAMS) }
            { 233 cuGraphInstantiateWithParams_ptsz "cuGraphInstantiateWithParams" 12000 PerThread Graph (phGraphExec: *mut sys::CUgraphExec, hGraph: sys::CUgraph, instantiateParams: *mut sys::CUDA_GRAPH_INSTANTIATE_PARAMS) }
            { 234 cuGraphKernelNodeCopyAttributes "cuGraphKernelNodeCopyAttributes" 11000 Legacy Graph (dst: sys::CUgraphNode, src: sys::CUgraphNode) }
            { 235 cuGraphKernelNodeGetAttribute "cuGraphKernelNodeGetAttribute" 11000 Legacy Graph (hNode: sys::CUgraphNode, attr: c_uint, value_out: *mut sys::CUkernelNodeAttrValue) }
            { 236 cuGraphKernelNodeGetParams "cuGraphKernelNodeGetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUDA_KERNEL_NODE_PARAMS_v1) }
            { 237 cuGraphKernelNodeGetParams_v2 "cuGraphKernelNodeGetParams" 12000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUDA_KERNEL_NODE_PARAMS) }
            { 238 cuGraphKernelNodeSetAttribute "cuGraphKernelNodeSetAttribute" 11000 Legacy Graph (hNode: sys::CUgraphNode, attr: c_uint, value: *const sys::CUkernelNodeAttrValue) }
            { 239 cuGraphKernelNodeSetParams "cuGraphKernelNodeSetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) }
            { 240 cuGraphKernelNodeSetParams_v2 "cuGraphKernelNodeSetParams" 12000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_KERNEL_NODE_PARAMS) }
            { 241 cuGraphLaunch "cuGraphLaunch" 10000 Legacy Launch (hGraph: sys::CUgraphExec, hStream: sys::CUstream) }
            { 242 cuGraphLaunch_ptsz "cuGraphLaunch" 10000 PerThread Launch (hGraphExec: sys::CUgraphExec, hStream: sys::CUstream) }
            { 243 cuGraphMemAllocNodeGetParams "cuGraphMemAllocNodeGetParams" 11040 Legacy Graph (hNode: sys::CUgraphNode, params_out: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS) }
            { 244 cuGraphMemFreeNodeGetParams "cuGraphMemFreeNodeGetParams" 11040 Legacy Graph (hNode: sys::CUgraphNode, dptr_out: *mut CUdeviceptr) }
            { 245 cuGraphMemcpyNodeGetParams "cuGraphMemcpyNodeGetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUDA_MEMCPY3D) }
            { 246 cuGraphMemcpyNodeSetParams "cuGraphMemcpyNodeSetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_MEMCPY3D) }
            { 247 cuGraphMemsetNodeGetParams "cuGraphMemsetNodeGetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUDA_MEMSET_NODE_PARAMS) }
            { 248 cuGraphMemsetNodeSetParams "cuGraphMemsetNodeSetParams" 10000 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *const sys::CUDA_MEMSET_NODE_PARAMS) }
            { 249 cuGraphNodeFindInClone "cuGraphNodeFindInClone" 10000 Legacy Graph (phNode: *mut sys::CUgraphNode, hOriginalNode: sys::CUgraphNode, hClonedGraph: sys::CUgraph) }
            { 250 cuGraphNodeGetContainingGraph "cuGraphNodeGetContainingGraph" 13010 Legacy Graph (hNode: sys::CUgraphNode, phGraph: *mut sys::CUgraph) }
            { 251 cuGraphNodeGetDependencies "cuGraphNodeGetDependencies" 10000 Legacy Graph (hNode: sys::CUgraphNode, dependencies: *mut sys::CUgraphNode, numDependencies: *mut usize) }
            { 252 cuGraphNodeGetDependencies_v2 "cuGraphNodeGetDependencies" 12030 Legacy Graph (hNode: sys::CUgraphNode, dependencies: *mut sys::CUgraphNode, edgeData: *mut sys::CUgraphEdgeData, numDependencies: *mut usize) }
            { 253 cuGraphNodeGetDependentNodes "cuGraphNodeGetDependentNodes" 10000 Legacy Graph (hNode: sys::CUgraphNode, dependentNodes: *mut sys::CUgraphNode, numDependentNodes: *mut usize) }
            { 254 cuGraphNodeGetDependentNodes_v2 "cuGraphNodeGetDependentNodes" 12030 Legacy Graph (hNode: sys::CUgraphNode, dependentNodes: *mut sys::CUgraphNode, edgeData: *mut sys::CUgraphEdgeData, numDependentNodes: *mut usize) }
            { 255 cuGraphNodeGetEnabled "cuGraphNodeGetEnabled" 11060 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, isEnabled: *mut c_uint) }
            { 256 cuGraphNodeGetLocalId "cuGraphNodeGetLocalId" 13010 Legacy Graph (hNode: sys::CUgraphNode, nodeId: *mut c_uint) }
            { 257 cuGraphNodeGetParams "cuGraphNodeGetParams" 13020 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUgraphNodeParams) }
            { 258 cuGraphNodeGetToolsId "cuGraphNodeGetToolsId" 13010 Legacy Graph (hNode: sys::CUgraphNode, toolsNodeId: *mut c_ulonglong) }
            { 259 cuGraphNodeGetType "cuGraphNodeGetType" 10000 Legacy Graph (hNode: sys::CUgraphNode, type_: *mut c_uint) }
            { 260 cuGraphNodeSetEnabled "cuGraphNodeSetEnabled" 11060 Legacy Graph (hGraphExec: sys::CUgraphExec, hNode: sys::CUgraphNode, isEnabled: c_uint) }
            { 261 cuGraphNodeSetParams "cuGraphNodeSetParams" 12020 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUgraphNodeParams) }
            { 262 cuGraphNodeSetParams_v2 "cuGraphNodeSetParams" 13040 Legacy Graph (hNode: sys::CUgraphNode, nodeParams: *mut sys::CUgraphNodeParams) }
            { 263 cuGraphReleaseUserObject "cuGraphReleaseUserObject" 11030 Legacy Graph (graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint) }
            { 264 cuGraphRemoveDependencies "cuGraphRemoveDependencies" 10000 Legacy Graph (hGraph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, numDependencies: usize) }
            { 265 cuGraphRemoveDependencies_v2 "cuGraphRemoveDependencies" 12030 Legacy Graph (hGraph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, edgeData: *const sys::CUgraphEdgeData, numDependencies: usize) }
            { 266 cuGraphRetainUserObject "cuGraphRetainUserObject" 11030 Legacy Graph (graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint, flags: c_uint) }
            { 267 cuGraphUpload "cuGraphUpload" 11010 Legacy Graph (hGraph: sys::CUgraphExec, hStream: sys::CUstream) }
            { 268 cuGraphUpload_ptsz "cuGraphUpload" 11010 PerThread Graph (hGraphExec: sys::CUgraphExec, hStream: sys::CUstream) }
            { 269 cuGraphicsEGLRegisterImage "cuGraphicsEGLRegisterImage" 7000 Legacy Ipc (pCudaResource: *mut sys::CUgraphicsResource, image: *mut c_void, flags: c_uint) }
            { 270 cuGraphicsGLRegisterBuffer "cuGraphicsGLRegisterBuffer" 3000 Legacy Ipc (pCudaResource: *mut sys::CUgraphicsResource, buffer: c_uint, Flags: c_uint) }
            { 271 cuGraphicsGLRegisterImage "cuGraphicsGLRegisterImage" 3000 Legacy Ipc (pCudaResource: *mut sys::CUgraphicsResource, image: c_uint, target: c_uint, Flags: c_uint) }
            { 272 cuGraphicsMapResources "cuGraphicsMapResources" 3000 Legacy Ipc (count: c_uint, resources: *mut sys::CUgraphicsResource, hStream: sys::CUstream) }
            { 273 cuGraphicsMapResources_ptsz "cuGraphicsMapResources" 7000 PerThread Ipc (count: c_uint, resources: *mut sys::CUgraphicsResource, hStream: sys::CUstream) }
            { 274 cuGraphicsResourceGetMappedEglFrame "cuGraphicsResourceGetMappedEglFrame" 7000 Legacy Ipc (eglFrame: *mut c_void, resource: sys::CUgraphicsResource, index: c_uint, mipLevel: c_uint) }
            { 275 cuGraphicsResourceGetMappedMipmappedArray "cuGraphicsResourceGetMappedMipmappedArray" 5000 Legacy Ipc (pMipmappedArray: *mut sys::CUmipmappedArray, resource: sys::CUgraphicsResource) }
            { 276 cuGraphicsResourceGetMappedPointer "cuGraphicsResourceGetMappedPointer" 3000 Legacy Ipc (pDevPtr: *mut c_uint, pSize: *mut c_uint, resource: sys::CUgraphicsResource) }
            { 277 cuGraphicsResourceGetMappedPointer_v2 "cuGraphicsResourceGetMappedPointer" 3020 Legacy Ipc (pDevPtr: *mut CUdeviceptr, pSize: *mut usize, resource: sys::CUgraphicsResource) }
            { 278 cuGraphicsResourceSetMapFlags "cuGraphicsResourceSetMapFlags" 3000 Legacy Ipc (resource: sys::CUgraphicsResource, flags: c_uint) }
            { 279 cuGraphicsResourceSetMapFlags_v2 "cuGraphicsResourceSetMapFlags" 6050 Legacy Ipc (resource: sys::CUgraphicsResource, flags: c_uint) }
            { 280 cuGraphicsSubResourceGetMappedArray "cuGraphicsSubResourceGetMappedArray" 3000 Legacy Ipc (pArray: *mut sys::CUarray, resource: sys::CUgraphicsResource, arrayIndex: c_uint, mipLevel: c_uint) }
            { 281 cuGraphicsUnmapResources "cuGraphicsUnmapResources" 3000 Legacy Ipc (count: c_uint, resources: *mut sys::CUgraphicsResource, hStream: sys::CUstream) }
            { 282 cuGraphicsUnmapResources_ptsz "cuGraphicsUnmapResources" 7000 PerThread Ipc (count: c_uint, resources: *mut sys::CUgraphicsResource, hStream: sys::CUstream) }
            { 283 cuGraphicsUnregisterResource "cuGraphicsUnregisterResource" 3000 Legacy Ipc (resource: sys::CUgraphicsResource) }
            { 284 cuGraphicsVDPAURegisterOutputSurface "cuGraphicsVDPAURegisterOutputSurface" 3010 Legacy Ipc (pCudaResource: *mut sys::CUgraphicsResource, vdpSurface: u32, flags: c_uint) }
            { 285 cuGraphicsVDPAURegisterVideoSurface "cuGraphicsVDPAURegisterVideoSurface" 3010 Legacy Ipc (pCudaResource: *mut sys::CUgraphicsResource, vdpSurface: u32, flags: c_uint) }
            { 286 cuGreenCtxCreate "cuGreenCtxCreate" 12040 Legacy Context (phCtx: *mut sys::CUgreenCtx, desc: sys::CUdevResourceDesc, dev: CUdevice, flags: c_uint) }
            { 287 cuGreenCtxDestroy "cuGreenCtxDestroy" 12040 Legacy Context (hCtx: sys::CUgreenCtx) }
            { 288 cuGreenCtxGetDevResource "cuGreenCtxGetDevResource" 12040 Legacy Context (hCtx: sys::CUgreenCtx, resource: *mut sys::CUdevResource, type_: c_uint) }
            { 289 cuGreenCtxGetId "cuGreenCtxGetId" 12090 Legacy Context (greenCtx: sys::CUgreenCtx, greenCtxId: *mut c_ulonglong) }
            { 290 cuGreenCtxRecordEvent "cuGreenCtxRecordEvent" 12040 Legacy Sync (hCtx: sys::CUgreenCtx, hEvent: sys::CUevent) }
            { 291 cuGreenCtxStreamCreate "cuGreenCtxStreamCreate" 12050 Legacy Context (phStream: *mut sys::CUstream, greenCtx: sys::CUgreenCtx, flags: c_uint, priority: c_int) }
            { 292 cuGreenCtxWaitEvent "cuGreenCtxWaitEvent" 12040 Legacy Sync (hCtx: sys::CUgreenCtx, hEvent: sys::CUevent) }
            { 293 cuImportExternalMemory "cuImportExternalMemory" 10000 Legacy Ipc (extMem_out: *mut sys::CUexternalMemory, memHandleDesc: *const sys::CUDA_EXTERNAL_MEMORY_HANDLE_DESC) }
            { 294 cuImportExternalSemaphore "cuImportExternalSemaphore" 10000 Legacy Ipc (extSem_out: *mut sys::CUexternalSemaphore, semHandleDesc: *const sys::CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC) }
            { 295 cuInit "cuInit" 2000 Legacy Other (Flags: c_uint) }
            { 296 cuIpcCloseMemHandle "cuIpcCloseMemHandle" 4010 Legacy Ipc (dptr: CUdeviceptr) }
            { 297 cuIpcGetEventHandle "cuIpcGetEventHandle" 4010 Legacy Ipc (pHandle: *mut sys::CUipcEventHandle, event: sys::CUevent) }
            { 298 cuIpcGetMemHandle "cuIpcGetMemHandle" 4010 Legacy Ipc (pHandle: *mut sys::CUipcMemHandle, dptr: CUdeviceptr) }
            { 299 cuIpcOpenEventHandle "cuIpcOpenEventHandle" 4010 Legacy Ipc (phEvent: *mut sys::CUevent, handle: sys::CUipcEventHandle) }
            { 300 cuIpcOpenMemHandle "cuIpcOpenMemHandle" 4010 Legacy Ipc (pdptr: *mut CUdeviceptr, handle: sys::CUipcMemHandle, Flags: c_uint) }
            { 301 cuIpcOpenMemHandle_v2 "cuIpcOpenMemHandle" 11000 Legacy Ipc (pdptr: *mut CUdeviceptr, handle: sys::CUipcMemHandle, Flags: c_uint) }
            { 302 cuKernelGetAttribute "cuKernelGetAttribute" 12000 Legacy Other (pi: *mut c_int, attrib: c_uint, kernel: sys::CUkernel, dev: CUdevice) }
            { 303 cuKernelGetFunction "cuKernelGetFunction" 12000 Legacy Other (pFunc: *mut sys::CUfunction, kernel: sys::CUkernel) }
            { 304 cuKernelGetLibrary "cuKernelGetLibrary" 12050 Legacy Other (pLib: *mut sys::CUlibrary, kernel: sys::CUkernel) }
            { 305 cuKernelGetName "cuKernelGetName" 12030 Legacy Other (name: *mut *const c_char, hfunc: sys::CUkernel) }
            { 306 cuKernelGetParamCount "cuKernelGetParamCount" 13020 Legacy Other (kernel: sys::CUkernel, paramCount: *mut usize) }
            { 307 cuKernelGetParamInfo "cuKernelGetParamInfo" 12040 Legacy Other (kernel: sys::CUkernel, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) }
            { 308 cuKernelSetAttribute "cuKernelSetAttribute" 12000 Legacy Other (attrib: c_uint, val: c_int, kernel: sys::CUkernel, dev: CUdevice) }
            { 309 cuKernelSetCacheConfig "cuKernelSetCacheConfig" 12000 Legacy Other (kernel: sys::CUkernel, config: c_uint, dev: CUdevice) }
            { 310 cuLaunch "cuLaunch" 2000 Legacy Launch (f: sys::CUfunction) }
            { 311 cuLaunchCooperativeKernel "cuLaunchCooperativeKernel" 9000 Legacy Launch (f: sys::CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: sys::CUstream, kernelParams: *mut *mut c_void) }
            { 312 cuLaunchCooperativeKernel_ptsz "cuLaunchCooperativeKernel" 9000 PerThread Launch (f: sys::CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: sys::CUstream, kernelParams: *mut *mut c_void) }
            { 313 cuLaunchCooperativeKernelMultiDevice "cuLaunchCooperativeKernelMultiDevice" 9000 Legacy Launch (launchParamsList: *mut sys::CUDA_LAUNCH_PARAMS, numDevices: c_uint, flags: c_uint) }
            { 314 cuLaunchGrid "cuLaunchGrid" 2000 Legacy Launch (f: sys::CUfunction, grid_width: c_int, grid_height: c_int) }
            { 315 cuLaunchGridAsync "cuLaunchGridAsync" 2000 Legacy Launch (f: sys::CUfunction, grid_width: c_int, grid_height: c_int, hStream: sys::CUstream) }
            { 316 cuLaunchHostFunc "cuLaunchHostFunc" 10000 Legacy Launch (hStream: sys::CUstream, fn_: sys::CUhostFn, userData: *mut c_void) }
            { 317 cuLaunchHostFunc_v2 "cuLaunchHostFunc" 13010 Legacy Launch (hStream: sys::CUstream, fn_: sys::CUhostFn, userData: *mut c_void, syncMode: c_uint) }
            { 318 cuLaunchHostFunc_ptsz "cuLaunchHostFunc" 10000 PerThread Launch (hStream: sys::CUstream, fn_: sys::CUhostFn, userData: *mut c_void) }
            { 319 cuLaunchHostFunc_v2_ptsz "cuLaunchHostFunc" 13010 PerThread Launch (hStream: sys::CUstream, fn_: sys::CUhostFn, userData: *mut c_void, syncMode: c_uint) }
            { 320 cuLaunchKernel "cuLaunchKernel" 4000 Legacy Launch (f: sys::CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: sys::CUstream, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) }
            { 321 cuLaunchKernel_ptsz "cuLaunchKernel" 7000 PerThread Launch (f: sys::CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: sys::CUstream, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) }
            { 322 cuLaunchKernelEx "cuLaunchKernelEx" 11060 Legacy Launch (config: *const sys::CUlaunchConfig, f: sys::CUfunction, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) }
            { 323 cuLaunchKernelEx_ptsz "cuLaunchKernelEx" 11060 PerThread Launch (config: *const sys::CUlaunchConfig, f: sys::CUfunction, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) }
            { 324 cuLibraryEnumerateKernels "cuLibraryEnumerateKernels" 12040 Legacy Other (kernels: *mut sys::CUkernel, numKernels: c_uint, lib: sys::CUlibrary) }
            { 325 cuLibraryGetGlobal "cuLibraryGetGlobal" 12000 Legacy Other (dptr: *mut CUdeviceptr, bytes: *mut usize, library: sys::CUlibrary, name: *const c_char) }
            { 326 cuLibraryGetKernel "cuLibraryGetKernel" 12000 Legacy Other (pKernel: *mut sys::CUkernel, library: sys::CUlibrary, name: *const c_char) }
            { 327 cuLibraryGetKernelCount "cuLibraryGetKernelCount" 12040 Legacy Other (count: *mut c_uint, lib: sys::CUlibrary) }
            { 328 cuLibraryGetManaged "cuLibraryGetManaged" 12000 Legacy Other (dptr: *mut CUdeviceptr, bytes: *mut usize, library: sys::CUlibrary, name: *const c_char) }
            { 329 cuLibraryGetModule "cuLibraryGetModule" 12000 Legacy Other (pMod: *mut sys::CUmodule, library: sys::CUlibrary) }
            { 330 cuLibraryGetUnifiedFunction "cuLibraryGetUnifiedFunction" 12000 Legacy Other (fptr: *mut *mut c_void, library: sys::CUlibrary, symbol: *const c_char) }
            { 331 cuLibraryLoadData "cuLibraryLoadData" 12000 Legacy Other (library: *mut sys::CUlibrary, code: *const c_void, jitOptions: *mut c_uint, jitOptionsValues: *mut *mut c_void, numJitOptions: c_uint, libraryOptions: *mut c_uint, libraryOptionValues: *mut *mut c_void, numLibraryOptions: c_uint) }
            { 332 cuLibraryLoadFromFile "cuLibraryLoadFromFile" 12000 Legacy Other (library: *mut sys::CUlibrary, fileName: *const c_char, jitOptions: *mut c_uint, jitOptionsValues: *mut *mut c_void, numJitOptions: c_uint, libraryOptions: *mut c_uint, libraryOptionValues: *mut *mut c_void, numLibraryOptions: c_uint) }
            { 333 cuLibraryUnload "cuLibraryUnload" 12000 Legacy Other (library: sys::CUlibrary) }
            { 334 cuLinkAddData "cuLinkAddData" 5050 Legacy Other (state: sys::CUlinkState, type_: c_uint, data: *mut c_void, size: usize, name: *const c_char, numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void) }
            { 335 cuLinkAddData_v2 "cuLinkAddData" 6050 Legacy Other (state: sys::CUlinkState, type_: c_uint, data: *mut c_void, size: usize, name: *const c_char, numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void) }
            { 336 cuLinkAddFile "cuLinkAddFile" 5050 Legacy Other (state: sys::CUlinkState, type_: c_uint, path: *const c_char, numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void) }
            { 337 cuLinkAddFile_v2 "cuLinkAddFile" 6050 Legacy Other (state: sys::CUlinkState, type_: c_uint, path: *const c_char, numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void) }
            { 338 cuLinkComplete "cuLinkComplete" 5050 Legacy Other (state: sys::CUlinkState, cubinOut: *mut *mut c_void, sizeOut: *mut usize) }
            { 339 cuLinkCreate "cuLinkCreate" 5050 Legacy Other (numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void, stateOut: *mut sys::CUlinkState) }
            { 340 cuLinkCreate_v2 "cuLinkCreate" 6050 Legacy Other (numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void, stateOut: *mut sys::CUlinkState) }
            { 341 cuLinkDestroy "cuLinkDestroy" 5050 Legacy Other (state: sys::CUlinkState) }
            { 342 cuLogicalEndpointAddDevice "cuLogicalEndpointAddDevice" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, dev: CUdevice) }
            { 343 cuLogicalEndpointBindAddr "cuLogicalEndpointBindAddr" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, dev: CUdevice, offset: u64, ptr: *mut c_void, size: u64, flags: c_ulonglong) }
            { 344 cuLogicalEndpointBindMem "cuLogicalEndpointBindMem" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, dev: CUdevice, offset: u64, memHandle: sys::CUmemGenericAllocationHandle, memOffset: u64, size: u64, flags: c_ulonglong) }
            { 345 cuLogicalEndpointCreate "cuLogicalEndpointCreate" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, prop: *const sys::CUlogicalEndpointProp) }
            { 346 cuLogicalEndpointDestroy "cuLogicalEndpointDestroy" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId) }
            { 347 cuLogicalEndpointExport "cuLogicalEndpointExport" 13030 Legacy Vmm (handle: *mut c_void, leId: sys::CUlogicalEndpointId, handleType: c_uint) }
            { 348 cuLogicalEndpointGetLimits "cuLogicalEndpointGetLimits" 13030 Legacy Vmm (bindAlignment: *mut u64, maxSize: *mut u64, prop: *const sys::CUlogicalEndpointProp) }
            { 349 cuLogicalEndpointIdRelease "cuLogicalEndpointIdRelease" 13030 Legacy Vmm (baseLeId: sys::CUlogicalEndpointId, count: u32) }
            { 350 cuLogicalEndpointIdReserve "cuLogicalEndpointIdReserve" 13030 Legacy Vmm (baseLeId: *mut sys::CUlogicalEndpointId, count: u32) }
            { 351 cuLogicalEndpointImport "cuLogicalEndpointImport" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, handle: *const c_void, handleType: c_uint) }
            { 352 cuLogicalEndpointQuery "cuLogicalEndpointQuery" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, count: u32, queryStatus: *mut c_int) }
            { 353 cuLogicalEndpointUnbind "cuLogicalEndpointUnbind" 13030 Legacy Vmm (leId: sys::CUlogicalEndpointId, dev: CUdevice, offset: u64, size: u64) }
            { 354 cuLogsCurrent "cuLogsCurrent" 12090 Legacy Other (iterator_out: *mut sys::CUlogIterator, flags: c_uint) }
            { 355 cuLogsDumpToFile "cuLogsDumpToFile" 12090 Legacy Other (iterator: *mut sys::CUlogIterator, pathToFile: *const c_char, flags: c_uint) }
            { 356 cuLogsDumpToMemory "cuLogsDumpToMemory" 12090 Legacy Other (iterator: *mut sys::CUlogIterator, buffer: *mut c_char, size: *mut usize, flags: c_uint) }
            { 357 cuLogsRegisterCallback "cuLogsRegisterCallback" 12090 Legacy Other (callbackFunc: sys::CUlogsCallback, userData: *mut c_void, callback_out: *mut sys::CUlogsCallbackHandle) }
            { 358 cuLogsUnregisterCallback "cuLogsUnregisterCallback" 12090 Legacy Other (callback: sys::CUlogsCallbackHandle) }
            { 359 cuMemAddressFree "cuMemAddressFree" 10020 Legacy Vmm (ptr: CUdeviceptr, size: usize) }
            { 360 cuMemAddressReserve "cuMemAddressReserve" 10020 Legacy Vmm (ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: c_ulonglong) }
            { 361 cuMemAdvise "cuMemAdvise" 8000 Legacy Other (devPtr: CUdeviceptr, count: usize, advice: c_uint, device: CUdevice) }
            { 362 cuMemAdvise_v2 "cuMemAdvise" 12020 Legacy Other (devPtr: CUdeviceptr, count: usize, advice: c_uint, location: CUmemLocation) }
            { 363 cuMemAlloc "cuMemAlloc" 2000 Legacy Alloc (dptr: *mut c_uint, bytesize: c_uint) }
            { 364 cuMemAlloc_v2 "cuMemAlloc" 3020 Legacy Alloc (dptr: *mut CUdeviceptr, bytesize: usize) }
            { 365 cuMemAllocAsync "cuMemAllocAsync" 11020 Legacy Alloc (dptr: *mut CUdeviceptr, bytesize: usize, hStream: sys::CUstream) }
            { 366 cuMemAllocAsync_ptsz "cuMemAllocAsync" 11020 PerThread Alloc (dptr: *mut CUdeviceptr, bytesize: usize, hStream: sys::CUstream) }
            { 367 cuMemAllocFromPoolAsync "cuMemAllocFromPoolAsync" 11020 Legacy Alloc (dptr: *mut CUdeviceptr, bytesize: usize, pool: sys::CUmemoryPool, hStream: sys::CUstream) }
            { 368 cuMemAllocFromPoolAsync_ptsz "cuMemAllocFromPoolAsync" 11020 PerThread Alloc (dptr: *mut CUdeviceptr, bytesize: usize, pool: sys::CUmemoryPool, hStream: sys::CUstream) }
            { 369 cuMemAllocHost "cuMemAllocHost" 2000 Legacy Alloc (pp: *mut *mut c_void, bytesize: c_uint) }
            { 370 cuMemAllocHost_v2 "cuMemAllocHost" 3020 Legacy Alloc (pp: *mut *mut c_void, bytesize: usize) }
            { 371 cuMemAllocManaged "cuMemAllocManaged" 6000 Legacy Alloc (dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint) }
            { 372 cuMemAllocPitch "cuMemAllocPitch" 2000 Legacy Alloc (dptr: *mut c_uint, pPitch: *mut c_uint, WidthInBytes: c_uint, Height: c_uint, ElementSizeBytes: c_uint) }
            { 373 cuMemAllocPitch_v2 "cuMemAllocPitch" 3020 Legacy Alloc (dptr: *mut CUdeviceptr, pPitch: *mut usize, WidthInBytes: usize, Height: usize, ElementSizeBytes: c_uint) }
            { 374 cuMemBatchDecompressAsync "cuMemBatchDecompressAsync" 12060 Legacy Copy (paramsArray: *mut sys::CUmemDecompressParams, count: usize, flags: c_uint, errorIndex: *mut usize, stream: sys::CUstream) }
            { 375 cuMemBatchDecompressAsync_ptsz "cuMemBatchDecompressAsync" 12060 PerThread Copy (paramsArray: *mut sys::CUmemDecompressParams, count: usize, flags: c_uint, errorIndex: *mut usize, stream: sys::CUstream) }
            { 376 cuMemCreate "cuMemCreate" 10020 Legacy Vmm (handle: *mut sys::CUmemGenericAllocationHandle, size: usize, prop: *const sys::CUmemAllocationProp, flags: c_ulonglong) }
            { 377 cuMemDiscardAndPrefetchBatchAsync "cuMemDiscardAndPrefetchBatchAsync" 13000 Legacy Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 378 cuMemDiscardAndPrefetchBatchAsync_ptsz "cuMemDiscardAndPrefetchBatchAsync" 13000 PerThread Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 379 cuMemDiscardBatchAsync "cuMemDiscardBatchAsync" 13000 Legacy Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 380 cuMemDiscardBatchAsync_ptsz "cuMemDiscardBatchAsync" 13000 PerThread Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 381 cuMemExportToShareableHandle "cuMemExportToShareableHandle" 10020 Legacy Vmm (shareableHandle: *mut c_void, handle: sys::CUmemGenericAllocationHandle, handleType: sys::CUmemAllocationHandleType, flags: c_ulonglong) }
            { 382 cuMemFree "cuMemFree" 2000 Legacy Free (dptr: c_uint) }
            { 383 cuMemFree_v2 "cuMemFree" 3020 Legacy Free (dptr: CUdeviceptr) }
            { 384 cuMemFreeAsync "cuMemFreeAsync" 11020 Legacy Free (dptr: CUdeviceptr, hStream: sys::CUstream) }
            { 385 cuMemFreeAsync_ptsz "cuMemFreeAsync" 11020 PerThread Free (dptr: CUdeviceptr, hStream: sys::CUstream) }
            { 386 cuMemFreeHost "cuMemFreeHost" 2000 Legacy Free (p: *mut c_void) }
            { 387 cuMemGetAccess "cuMemGetAccess" 10020 Legacy Vmm (flags: *mut c_ulonglong, location: *const CUmemLocation, ptr: CUdeviceptr) }
            { 388 cuMemGetAddressRange "cuMemGetAddressRange" 2000 Legacy Other (pbase: *mut c_uint, psize: *mut c_uint, dptr: c_uint) }
            { 389 cuMemGetAddressRange_v2 "cuMemGetAddressRange" 3020 Legacy Other (pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr) }
            { 390 cuMemGetAllocationGranularity "cuMemGetAllocationGranularity" 10020 Legacy Vmm (granularity: *mut usize, prop: *const sys::CUmemAllocationProp, option: c_uint) }
            { 391 cuMemGetAllocationPropertiesFromHandle "cuMemGetAllocationPropertiesFromHandle" 10020 Legacy Vmm (prop: *mut sys::CUmemAllocationProp, handle: sys::CUmemGenericAllocationHandle) }
            { 392 cuMemGetDefaultMemPool "cuMemGetDefaultMemPool" 13000 Legacy Pool (pool_out: *mut sys::CUmemoryPool, location: *mut CUmemLocation, type_: c_uint) }
            { 393 cuMemGetHandleForAddressRange "cuMemGetHandleForAddressRange" 11070 Legacy Other (handle: *mut c_void, dptr: CUdeviceptr, size: usize, handleType: c_uint, flags: c_ulonglong) }
            { 394 cuMemGetInfo "cuMemGetInfo" 2000 Legacy Info (free: *mut c_uint, total: *mut c_uint) }
            { 395 cuMemGetInfo_v2 "cuMemGetInfo" 3020 Legacy Info (free: *mut usize, total: *mut usize) }
            { 396 cuMemGetLocationInfo "cuMemGetLocationInfo" 13040 Legacy Other (ptr: CUdeviceptr, size: usize, summaryGranularity: usize, samplingGranularity: usize, location_out: *mut CUmemLocation) }
            { 397 cuMemGetMemPool "cuMemGetMemPool" 13000 Legacy Pool (pool: *mut sys::CUmemoryPool, location: *mut CUmemLocation, type_: c_uint) }
            { 398 cuMemHostAlloc "cuMemHostAlloc" 2020 Legacy Alloc (pp: *mut *mut c_void, bytesize: usize, Flags: c_uint) }
            { 399 cuMemHostGetDevicePointer "cuMemHostGetDevicePointer" 2020 Legacy Other (pdptr: *mut c_uint, p: *mut c_void, Flags: c_uint) }
            { 400 cuMemHostGetDevicePointer_v2 "cuMemHostGetDevicePointer" 3020 Legacy Other (pdptr: *mut CUdeviceptr, p: *mut c_void, Flags: c_uint) }
            { 401 cuMemHostGetFlags "cuMemHostGetFlags" 2030 Legacy Other (pFlags: *mut c_uint, p: *mut c_void) }
            { 402 cuMemHostRegister "cuMemHostRegister" 4000 Legacy Alloc (p: *mut c_void, bytesize: usize, Flags: c_uint) }
            { 403 cuMemHostRegister_v2 "cuMemHostRegister" 6050 Legacy Alloc (p: *mut c_void, bytesize: usize, Flags: c_uint) }
            { 404 cuMemHostUnregister "cuMemHostUnregister" 4000 Legacy Free (p: *mut c_void) }
            { 405 cuMemImportFromShareableHandle "cuMemImportFromShareableHandle" 10020 Legacy Vmm (handle: *mut sys::CUmemGenericAllocationHandle, osHandle: *mut c_void, shHandleType: sys::CUmemAllocationHandleType) }
            { 406 cuMemMap "cuMemMap" 10020 Legacy Vmm (ptr: CUdeviceptr, size: usize, offset: usize, handle: sys::CUmemGenericAllocationHandle, flags: c_ulonglong) }
            { 407 cuMemMapArrayAsync "cuMemMapArrayAsync" 11010 Legacy Vmm (mapInfoList: *mut sys::CUarrayMapInfo, count: c_uint, hStream: sys::CUstream) }
            { 408 cuMemMapArrayAsync_ptsz "cuMemMapArrayAsync" 11010 PerThread Vmm (mapInfoList: *mut sys::CUarrayMapInfo, count: c_uint, hStream: sys::CUstream) }
            { 409 cuMemPoolCreate "cuMemPoolCreate" 11020 Legacy Pool (pool: *mut sys::CUmemoryPool, poolProps: *const sys::CUmemPoolProps) }
            { 410 cuMemPoolDestroy "cuMemPoolDestroy" 11020 Legacy Pool (pool: sys::CUmemoryPool) }
            { 411 cuMemPoolExportPointer "cuMemPoolExportPointer" 11020 Legacy Pool (shareData_out: *mut sys::CUmemPoolPtrExportData, ptr: CUdeviceptr) }
            { 412 cuMemPoolExportToShareableHandle "cuMemPoolExportToShareableHandle" 11020 Legacy Pool (handle_out: *mut c_void, pool: sys::CUmemoryPool, handleType: sys::CUmemAllocationHandleType, flags: c_ulonglong) }
            { 413 cuMemPoolGetAccess "cuMemPoolGetAccess" 11020 Legacy Pool (flags: *mut c_uint, memPool: sys::CUmemoryPool, location: *mut CUmemLocation) }
            { 414 cuMemPoolGetAttribute "cuMemPoolGetAttribute" 11020 Legacy Pool (pool: sys::CUmemoryPool, attr: c_uint, value: *mut c_void) }
            { 415 cuMemPoolImportFromShareableHandle "cuMemPoolImportFromShareableHandle" 11020 Legacy Pool (pool_out: *mut sys::CUmemoryPool, handle: *mut c_void, handleType: sys::CUmemAllocationHandleType, flags: c_ulonglong) }
            { 416 cuMemPoolImportPointer "cuMemPoolImportPointer" 11020 Legacy Pool (ptr_out: *mut CUdeviceptr, pool: sys::CUmemoryPool, shareData: *mut sys::CUmemPoolPtrExportData) }
            { 417 cuMemPoolSetAccess "cuMemPoolSetAccess" 11020 Legacy Pool (pool: sys::CUmemoryPool, map: *const sys::CUmemAccessDesc, count: usize) }
            { 418 cuMemPoolSetAttribute "cuMemPoolSetAttribute" 11020 Legacy Pool (pool: sys::CUmemoryPool, attr: c_uint, value: *mut c_void) }
            { 419 cuMemPoolTrimTo "cuMemPoolTrimTo" 11020 Legacy Pool (pool: sys::CUmemoryPool, minBytesToKeep: usize) }
            { 420 cuMemPrefetchAsync "cuMemPrefetchAsync" 8000 Legacy Copy (devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: sys::CUstream) }
            { 421 cuMemPrefetchAsync_v2 "cuMemPrefetchAsync" 12020 Legacy Copy (devPtr: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, hStream: sys::CUstream) }
            { 422 cuMemPrefetchAsync_ptsz "cuMemPrefetchAsync" 8000 PerThread Copy (devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: sys::CUstream) }
            { 423 cuMemPrefetchAsync_v2_ptsz "cuMemPrefetchAsync" 12020 PerThread Copy (devPtr: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, hStream: sys::CUstream) }
            { 424 cuMemPrefetchBatchAsync "cuMemPrefetchBatchAsync" 13000 Legacy Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 425 cuMemPrefetchBatchAsync_ptsz "cuMemPrefetchBatchAsync" 13000 PerThread Copy (dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 426 cuMemRangeGetAttribute "cuMemRangeGetAttribute" 8000 Legacy Other (data: *mut c_void, dataSize: usize, attribute: c_uint, devPtr: CUdeviceptr, count: usize) }
            { 427 cuMemRangeGetAttributes "cuMemRangeGetAttributes" 8000 Legacy Other (data: *mut *mut c_void, dataSizes: *mut usize, attributes: *mut c_uint, numAttributes: usize, devPtr: CUdeviceptr, count: usize) }
            { 428 cuMemRelease "cuMemRelease" 10020 Legacy Vmm (handle: sys::CUmemGenericAllocationHandle) }
            { 429 cuMemRetainAllocationHandle "cuMemRetainAllocationHandle" 11000 Legacy Vmm (handle: *mut sys::CUmemGenericAllocationHandle, addr: *mut c_void) }
            { 430 cuMemSetAccess "cuMemSetAccess" 10020 Legacy Vmm (ptr: CUdeviceptr, size: usize, desc: *const sys::CUmemAccessDesc, count: usize) }
            { 431 cuMemSetMemPool "cuMemSetMemPool" 13000 Legacy Pool (location: *mut CUmemLocation, type_: c_uint, pool: sys::CUmemoryPool) }
            { 432 cuMemUnmap "cuMemUnmap" 10020 Legacy Vmm (ptr: CUdeviceptr, size: usize) }
            { 433 cuMemcpy "cuMemcpy" 4000 Legacy Copy (dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) }
            { 434 cuMemcpy_ptds "cuMemcpy" 7000 PerThread Copy (dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) }
            { 435 cuMemcpy2D "cuMemcpy2D" 2000 Legacy Copy (pCopy: *const c_void) }
            { 436 cuMemcpy2D_v2 "cuMemcpy2D" 3020 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY2D) }
            { 437 cuMemcpy2D_v2_ptds "cuMemcpy2D" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY2D) }
            { 438 cuMemcpy2DAsync "cuMemcpy2DAsync" 2000 Legacy Copy (pCopy: *const c_void, hStream: sys::CUstream) }
            { 439 cuMemcpy2DAsync_v2 "cuMemcpy2DAsync" 3020 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY2D, hStream: sys::CUstream) }
            { 440 cuMemcpy2DAsync_v2_ptsz "cuMemcpy2DAsync" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY2D, hStream: sys::CUstream) }
            { 441 cuMemcpy2DUnaligned "cuMemcpy2DUnaligned" 2000 Legacy Copy (pCopy: *const c_void) }
            { 442 cuMemcpy2DUnaligned_v2 "cuMemcpy2DUnaligned" 3020 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY2D) }
            { 443 cuMemcpy2DUnaligned_v2_ptds "cuMemcpy2DUnaligned" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY2D) }
            { 444 cuMemcpy3D "cuMemcpy3D" 2000 Legacy Copy (pCopy: *const c_void) }
            { 445 cuMemcpy3D_v2 "cuMemcpy3D" 3020 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY3D) }
            { 446 cuMemcpy3D_v2_ptds "cuMemcpy3D" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY3D) }
            { 447 cuMemcpy3DAsync "cuMemcpy3DAsync" 2000 Legacy Copy (pCopy: *const c_void, hStream: sys::CUstream) }
            { 448 cuMemcpy3DAsync_v2 "cuMemcpy3DAsync" 3020 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY3D, hStream: sys::CUstream) }
            { 449 cuMemcpy3DAsync_v2_ptsz "cuMemcpy3DAsync" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY3D, hStream: sys::CUstream) }
            { 450 cuMemcpy3DBatchAsync "cuMemcpy3DBatchAsync" 12080 Legacy Copy (numOps: usize, opList: *mut sys::CUDA_MEMCPY3D_BATCH_OP, failIdx: *mut usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 451 cuMemcpy3DBatchAsync_v2 "cuMemcpy3DBatchAsync" 13000 Legacy Copy (numOps: usize, opList: *mut sys::CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: sys::CUstream) }
            { 452 cuMemcpy3DBatchAsync_ptsz "cuMemcpy3DBatchAsync" 12080 PerThread Copy (numOps: usize, opList: *mut sys::CUDA_MEMCPY3D_BATCH_OP, failIdx: *mut usize, flags: c_ulonglong, hStream: sys::CUstream) }
            { 453 cuMemcpy3DBatchAsync_v2_ptsz "cuMemcpy3DBatchAsync" 13000 PerThread Copy (numOps: usize, opList: *mut sys::CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: sys::CUstream) }
            { 454 cuMemcpy3DPeer "cuMemcpy3DPeer" 4000 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY3D_PEER) }
            { 455 cuMemcpy3DPeer_ptds "cuMemcpy3DPeer" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY3D_PEER) }
            { 456 cuMemcpy3DPeerAsync "cuMemcpy3DPeerAsync" 4000 Legacy Copy (pCopy: *const sys::CUDA_MEMCPY3D_PEER, hStream: sys::CUstream) }
            { 457 cuMemcpy3DPeerAsync_ptsz "cuMemcpy3DPeerAsync" 7000 PerThread Copy (pCopy: *const sys::CUDA_MEMCPY3D_PEER, hStream: sys::CUstream) }
            { 458 cuMemcpy3DWithAttributesAsync "cuMemcpy3DWithAttributesAsync" 13020 Legacy Copy (op: *mut sys::CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: sys::CUstream) }
            { 459 cuMemcpy3DWithAttributesAsync_ptsz "cuMemcpy3DWithAttributesAsync" 13020 PerThread Copy (op: *mut sys::CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: sys::CUstream) }
            { 460 cuMemcpyAsync "cuMemcpyAsync" 4000 Legacy Copy (dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 461 cuMemcpyAsync_ptsz "cuMemcpyAsync" 7000 PerThread Copy (dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 462 cuMemcpyAtoA "cuMemcpyAtoA" 2000 Legacy Copy (dstArray: sys::CUarray, dstOffset: c_uint, srcArray: sys::CUarray, srcOffset: c_uint, ByteCount: c_uint) }
            { 463 cuMemcpyAtoA_v2 "cuMemcpyAtoA" 3020 Legacy Copy (dstArray: sys::CUarray, dstOffset: usize, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 464 cuMemcpyAtoA_v2_ptds "cuMemcpyAtoA" 7000 PerThread Copy (dstArray: sys::CUarray, dstOffset: usize, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 465 cuMemcpyAtoD "cuMemcpyAtoD" 2000 Legacy Copy (dstDevice: c_uint, srcArray: sys::CUarray, srcOffset: c_uint, ByteCount: c_uint) }
            { 466 cuMemcpyAtoD_v2 "cuMemcpyAtoD" 3020 Legacy Copy (dstDevice: CUdeviceptr, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 467 cuMemcpyAtoD_v2_ptds "cuMemcpyAtoD" 7000 PerThread Copy (dstDevice: CUdeviceptr, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 468 cuMemcpyAtoH "cuMemcpyAtoH" 2000 Legacy Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: c_uint, ByteCount: c_uint) }
            { 469 cuMemcpyAtoH_v2 "cuMemcpyAtoH" 3020 Legacy Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 470 cuMemcpyAtoH_v2_ptds "cuMemcpyAtoH" 7000 PerThread Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize) }
            { 471 cuMemcpyAtoHAsync "cuMemcpyAtoHAsync" 2000 Legacy Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: c_uint, ByteCount: c_uint, hStream: sys::CUstream) }
            { 472 cuMemcpyAtoHAsync_v2 "cuMemcpyAtoHAsync" 3020 Legacy Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize, hStream: sys::CUstream) }
            { 473 cuMemcpyAtoHAsync_v2_ptsz "cuMemcpyAtoHAsync" 7000 PerThread Copy (dstHost: *mut c_void, srcArray: sys::CUarray, srcOffset: usize, ByteCount: usize, hStream: sys::CUstream) }
            { 474 cuMemcpyBatchAsync "cuMemcpyBatchAsync" 12080 Legacy Copy (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut sys::CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, failIdx: *mut usize, hStream: sys::CUstream) }
            { 475 cuMemcpyBatchAsync_v2 "cuMemcpyBatchAsync" 13000 Legacy Copy (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut sys::CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, hStream: sys::CUstream) }
            { 476 cuMemcpyBatchAsync_ptsz "cuMemcpyBatchAsync" 12080 PerThread Copy (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut sys::CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, failIdx: *mut usize, hStream: sys::CUstream) }
            { 477 cuMemcpyBatchAsync_v2_ptsz "cuMemcpyBatchAsync" 13000 PerThread Copy (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut sys::CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, hStream: sys::CUstream) }
            { 478 cuMemcpyDtoA "cuMemcpyDtoA" 2000 Legacy Copy (dstArray: sys::CUarray, dstOffset: c_uint, srcDevice: c_uint, ByteCount: c_uint) }
            { 479 cuMemcpyDtoA_v2 "cuMemcpyDtoA" 3020 Legacy Copy (dstArray: sys::CUarray, dstOffset: usize, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 480 cuMemcpyDtoA_v2_ptds "cuMemcpyDtoA" 7000 PerThread Copy (dstArray: sys::CUarray, dstOffset: usize, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 481 cuMemcpyDtoD "cuMemcpyDtoD" 2000 Legacy Copy (dstDevice: c_uint, srcDevice: c_uint, ByteCount: c_uint) }
            { 482 cuMemcpyDtoD_v2 "cuMemcpyDtoD" 3020 Legacy Copy (dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 483 cuMemcpyDtoD_v2_ptds "cuMemcpyDtoD" 7000 PerThread Copy (dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 484 cuMemcpyDtoDAsync "cuMemcpyDtoDAsync" 3000 Legacy Copy (dstDevice: c_uint, srcDevice: c_uint, ByteCount: c_uint, hStream: sys::CUstream) }
            { 485 cuMemcpyDtoDAsync_v2 "cuMemcpyDtoDAsync" 3020 Legacy Copy (dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 486 cuMemcpyDtoDAsync_v2_ptsz "cuMemcpyDtoDAsync" 7000 PerThread Copy (dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 487 cuMemcpyDtoH "cuMemcpyDtoH" 2000 Legacy Copy (dstHost: *mut c_void, srcDevice: c_uint, ByteCount: c_uint) }
            { 488 cuMemcpyDtoH_v2 "cuMemcpyDtoH" 3020 Legacy Copy (dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 489 cuMemcpyDtoH_v2_ptds "cuMemcpyDtoH" 7000 PerThread Copy (dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) }
            { 490 cuMemcpyDtoHAsync "cuMemcpyDtoHAsync" 2000 Legacy Copy (dstHost: *mut c_void, srcDevice: c_uint, ByteCount: c_uint, hStream: sys::CUstream) }
            { 491 cuMemcpyDtoHAsync_v2 "cuMemcpyDtoHAsync" 3020 Legacy Copy (dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 492 cuMemcpyDtoHAsync_v2_ptsz "cuMemcpyDtoHAsync" 7000 PerThread Copy (dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: sys::CUstream) }
            { 493 cuMemcpyHtoA "cuMemcpyHtoA" 2000 Legacy Copy (dstArray: sys::CUarray, dstOffset: c_uint, srcHost: *const c_void, ByteCount: c_uint) }
            { 494 cuMemcpyHtoA_v2 "cuMemcpyHtoA" 3020 Legacy Copy (dstArray: sys::CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize) }
            { 495 cuMemcpyHtoA_v2_ptds "cuMemcpyHtoA" 7000 PerThread Copy (dstArray: sys::CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize) }
            { 496 cuMemcpyHtoAAsync "cuMemcpyHtoAAsync" 2000 Legacy Copy (dstArray: sys::CUarray, dstOffset: c_uint, srcHost: *const c_void, ByteCount: c_uint, hStream: sys::CUstream) }
            { 497 cuMemcpyHtoAAsync_v2 "cuMemcpyHtoAAsync" 3020 Legacy Copy (dstArray: sys::CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize, hStream: sys::CUstream) }
            { 498 cuMemcpyHtoAAsync_v2_ptsz "cuMemcpyHtoAAsync" 7000 PerThread Copy (dstArray: sys::CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize, hStream: sys::CUstream) }
            { 499 cuMemcpyHtoD "cuMemcpyHtoD" 2000 Legacy Copy (dstDevice: c_uint, srcHost: *const c_void, ByteCount: c_uint) }
            { 500 cuMemcpyHtoD_v2 "cuMemcpyHtoD" 3020 Legacy Copy (dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) }
            { 501 cuMemcpyHtoD_v2_ptds "cuMemcpyHtoD" 7000 PerThread Copy (dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) }
            { 502 cuMemcpyHtoDAsync "cuMemcpyHtoDAsync" 2000 Legacy Copy (dstDevice: c_uint, srcHost: *const c_void, ByteCount: c_uint, hStream: sys::CUstream) }
            { 503 cuMemcpyHtoDAsync_v2 "cuMemcpyHtoDAsync" 3020 Legacy Copy (dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: sys::CUstream) }
            { 504 cuMemcpyHtoDAsync_v2_ptsz "cuMemcpyHtoDAsync" 7000 PerThread Copy (dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: sys::CUstream) }
            { 505 cuMemcpyPeer "cuMemcpyPeer" 4000 Legacy Copy (dstDevice: CUdeviceptr, dstContext: sys::CUcontext, srcDevice: CUdeviceptr, srcContext: sys::CUcontext, ByteCount: usize) }
            { 506 cuMemcpyPeer_ptds "cuMemcpyPeer" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstContext: sys::CUcontext, srcDevice: CUdeviceptr, srcContext: sys::CUcontext, ByteCount: usize) }
            { 507 cuMemcpyPeerAsync "cuMemcpyPeerAsync" 4000 Legacy Copy (dstDevice: CUdeviceptr, dstContext: sys::CUcontext, srcDevice: CUdeviceptr, srcContext: sys::CUcontext, ByteCount: usize, hStream: sys::CUstream) }
            { 508 cuMemcpyPeerAsync_ptsz "cuMemcpyPeerAsync" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstContext: sys::CUcontext, srcDevice: CUdeviceptr, srcContext: sys::CUcontext, ByteCount: usize, hStream: sys::CUstream) }
            { 509 cuMemcpyWithAttributesAsync "cuMemcpyWithAttributesAsync" 13020 Legacy Copy (dst: CUdeviceptr, src: CUdeviceptr, size: usize, attr: *mut sys::CUmemcpyAttributes, hStream: sys::CUstream) }
            { 510 cuMemcpyWithAttributesAsync_ptsz "cuMemcpyWithAttributesAsync" 13020 PerThread Copy (dst: CUdeviceptr, src: CUdeviceptr, size: usize, attr: *mut sys::CUmemcpyAttributes, hStream: sys::CUstream) }
            { 511 cuMemsetD16 "cuMemsetD16" 2000 Legacy Copy (dstDevice: c_uint, us: c_ushort, N: c_uint) }
            { 512 cuMemsetD16_v2 "cuMemsetD16" 3020 Legacy Copy (dstDevice: CUdeviceptr, us: c_ushort, N: usize) }
            { 513 cuMemsetD16_v2_ptds "cuMemsetD16" 7000 PerThread Copy (dstDevice: CUdeviceptr, us: c_ushort, N: usize) }
            { 514 cuMemsetD16Async "cuMemsetD16Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: sys::CUstream) }
            { 515 cuMemsetD16Async_ptsz "cuMemsetD16Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: sys::CUstream) }
            { 516 cuMemsetD2D16 "cuMemsetD2D16" 2000 Legacy Copy (dstDevice: c_uint, dstPitch: c_uint, us: c_ushort, Width: c_uint, Height: c_uint) }
            { 517 cuMemsetD2D16_v2 "cuMemsetD2D16" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize) }
            { 518 cuMemsetD2D16_v2_ptds "cuMemsetD2D16" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize) }
            { 519 cuMemsetD2D16Async "cuMemsetD2D16Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 520 cuMemsetD2D16Async_ptsz "cuMemsetD2D16Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 521 cuMemsetD2D32 "cuMemsetD2D32" 2000 Legacy Copy (dstDevice: c_uint, dstPitch: c_uint, ui: c_uint, Width: c_uint, Height: c_uint) }
            { 522 cuMemsetD2D32_v2 "cuMemsetD2D32" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize) }
            { 523 cuMemsetD2D32_v2_ptds "cuMemsetD2D32" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize) }
            { 524 cuMemsetD2D32Async "cuMemsetD2D32Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 525 cuMemsetD2D32Async_ptsz "cuMemsetD2D32Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 526 cuMemsetD2D8 "cuMemsetD2D8" 2000 Legacy Copy (dstDevice: c_uint, dstPitch: c_uint, uc: c_uchar, Width: c_uint, Height: c_uint) }
            { 527 cuMemsetD2D8_v2 "cuMemsetD2D8" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize) }
            { 528 cuMemsetD2D8_v2_ptds "cuMemsetD2D8" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize) }
            { 529 cuMemsetD2D8Async "cuMemsetD2D8Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 530 cuMemsetD2D8Async_ptsz "cuMemsetD2D8Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize, hStream: sys::CUstream) }
            { 531 cuMemsetD32 "cuMemsetD32" 2000 Legacy Copy (dstDevice: c_uint, ui: c_uint, N: c_uint) }
            { 532 cuMemsetD32_v2 "cuMemsetD32" 3020 Legacy Copy (dstDevice: CUdeviceptr, ui: c_uint, N: usize) }
            { 533 cuMemsetD32_v2_ptds "cuMemsetD32" 7000 PerThread Copy (dstDevice: CUdeviceptr, ui: c_uint, N: usize) }
            { 534 cuMemsetD32Async "cuMemsetD32Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: sys::CUstream) }
            { 535 cuMemsetD32Async_ptsz "cuMemsetD32Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: sys::CUstream) }
            { 536 cuMemsetD8 "cuMemsetD8" 2000 Legacy Copy (dstDevice: c_uint, uc: c_uchar, N: c_uint) }
            { 537 cuMemsetD8_v2 "cuMemsetD8" 3020 Legacy Copy (dstDevice: CUdeviceptr, uc: c_uchar, N: usize) }
            { 538 cuMemsetD8_v2_ptds "cuMemsetD8" 7000 PerThread Copy (dstDevice: CUdeviceptr, uc: c_uchar, N: usize) }
            { 539 cuMemsetD8Async "cuMemsetD8Async" 3020 Legacy Copy (dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: sys::CUstream) }
            { 540 cuMemsetD8Async_ptsz "cuMemsetD8Async" 7000 PerThread Copy (dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: sys::CUstream) }
            { 541 cuMipmappedArrayCreate "cuMipmappedArrayCreate" 5000 Legacy Array (pHandle: *mut sys::CUmipmappedArray, pMipmappedArrayDesc: *const sys::CUDA_ARRAY3D_DESCRIPTOR, numMipmapLevels: c_uint) }
            { 542 cuMipmappedArrayDestroy "cuMipmappedArrayDestroy" 5000 Legacy Array (hMipmappedArray: sys::CUmipmappedArray) }
            { 543 cuMipmappedArrayGetLevel "cuMipmappedArrayGetLevel" 5000 Legacy Array (pLevelArray: *mut sys::CUarray, hMipmappedArray: sys::CUmipmappedArray, level: c_uint) }
            { 544 cuMipmappedArrayGetMemoryRequirements "cuMipmappedArrayGetMemoryRequirements" 11060 Legacy Array (memoryRequirements: *mut sys::CUDA_ARRAY_MEMORY_REQUIREMENTS, mipmap: sys::CUmipmappedArray, device: CUdevice) }
            { 545 cuMipmappedArrayGetSparseProperties "cuMipmappedArrayGetSparseProperties" 11010 Legacy Array (sparseProperties: *mut sys::CUDA_ARRAY_SPARSE_PROPERTIES, mipmap: sys::CUmipmappedArray) }
            { 546 cuModuleEnumerateFunctions "cuModuleEnumerateFunctions" 12040 Legacy Other (functions: *mut sys::CUfunction, numFunctions: c_uint, mod_: sys::CUmodule) }
            { 547 cuModuleGetFunction "cuModuleGetFunction" 2000 Legacy Other (hfunc: *mut sys::CUfunction, hmod: sys::CUmodule, name: *const c_char) }
            { 548 cuModuleGetFunctionCount "cuModuleGetFunctionCount" 12040 Legacy Other (count: *mut c_uint, mod_: sys::CUmodule) }
            { 549 cuModuleGetGlobal "cuModuleGetGlobal" 2000 Legacy Other (dptr: *mut c_uint, bytes: *mut c_uint, hmod: sys::CUmodule, name: *const c_char) }
            { 550 cuModuleGetGlobal_v2 "cuModuleGetGlobal" 3020 Legacy Other (dptr: *mut CUdeviceptr, bytes: *mut usize, hmod: sys::CUmodule, name: *const c_char) }
            { 551 cuModuleGetLoadingMode "cuModuleGetLoadingMode" 11070 Legacy Other (mode: *mut c_uint) }
            { 552 cuModuleGetSurfRef "cuModuleGetSurfRef" 3000 Legacy Other (pSurfRef: *mut sys::CUsurfref, hmod: sys::CUmodule, name: *const c_char) }
            { 553 cuModuleGetTexRef "cuModuleGetTexRef" 2000 Legacy Other (pTexRef: *mut sys::CUtexref, hmod: sys::CUmodule, name: *const c_char) }
            { 554 cuModuleLoad "cuModuleLoad" 2000 Legacy Other (module: *mut sys::CUmodule, fname: *const c_char) }
            { 555 cuModuleLoadData "cuModuleLoadData" 2000 Legacy Other (module: *mut sys::CUmodule, image: *const c_void) }
            { 556 cuModuleLoadDataEx "cuModuleLoadDataEx" 2010 Legacy Other (module: *mut sys::CUmodule, image: *const c_void, numOptions: c_uint, options: *mut c_uint, optionValues: *mut *mut c_void) }
            { 557 cuModuleLoadFatBinary "cuModuleLoadFatBinary" 2000 Legacy Other (module: *mut sys::CUmodule, fatCubin: *const c_void) }
            { 558 cuModuleUnload "cuModuleUnload" 2000 Legacy Other (hmod: sys::CUmodule) }
            { 559 cuMulticastAddDevice "cuMulticastAddDevice" 12010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, dev: CUdevice) }
            { 560 cuMulticastBindAddr "cuMulticastBindAddr" 12010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, mcOffset: usize, memptr: CUdeviceptr, size: usize, flags: c_ulonglong) }
            { 561 cuMulticastBindAddr_v2 "cuMulticastBindAddr" 13010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize, memptr: CUdeviceptr, size: usize, flags: c_ulonglong) }
            { 562 cuMulticastBindMem "cuMulticastBindMem" 12010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, mcOffset: usize, memHandle: sys::CUmemGenericAllocationHandle, memOffset: usize, size: usize, flags: c_ulonglong) }
            { 563 cuMulticastBindMem_v2 "cuMulticastBindMem" 13010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize, memHandle: sys::CUmemGenericAllocationHandle, memOffset: usize, size: usize, flags: c_ulonglong) }
            { 564 cuMulticastCreate "cuMulticastCreate" 12010 Legacy Vmm (mcHandle: *mut sys::CUmemGenericAllocationHandle, prop: *const sys::CUmulticastObjectProp) }
            { 565 cuMulticastGetGranularity "cuMulticastGetGranularity" 12010 Legacy Vmm (granularity: *mut usize, prop: *const sys::CUmulticastObjectProp, option: c_uint) }
            { 566 cuMulticastUnbind "cuMulticastUnbind" 12010 Legacy Vmm (mcHandle: sys::CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize, size: usize) }
            { 567 cuOccupancyAvailableDynamicSMemPerBlock "cuOccupancyAvailableDynamicSMemPerBlock" 10020 Legacy Other (dynamicSmemSize: *mut usize, func: sys::CUfunction, numBlocks: c_int, blockSize: c_int) }
            { 568 cuOccupancyMaxActiveBlocksPerMultiprocessor "cuOccupancyMaxActiveBlocksPerMultiprocessor" 6050 Legacy Other (numBlocks: *mut c_int, func: sys::CUfunction, blockSize: c_int, dynamicSMemSize: usize) }
            { 569 cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" 7000 Legacy Other (numBlocks: *mut c_int, func: sys::CUfunction, blockSize: c_int, dynamicSMemSize: usize, flags: c_uint) }
            { 570 cuOccupancyMaxActiveClusters "cuOccupancyMaxActiveClusters" 11070 Legacy Other (numClusters: *mut c_int, func: sys::CUfunction, config: *const sys::CUlaunchConfig) }
            { 571 cuOccupancyMaxPotentialBlockSize "cuOccupancyMaxPotentialBlockSize" 6050 Legacy Other (minGridSize: *mut c_int, blockSize: *mut c_int, func: sys::CUfunction, blockSizeToDynamicSMemSize: sys::CUoccupancyB2DSize, dynamicSMemSize: usize, blockSizeLimit: c_int) }
            { 572 cuOccupancyMaxPotentialBlockSizeWithFlags "cuOccupancyMaxPotentialBlockSizeWithFlags" 7000 Legacy Other (minGridSize: *mut c_int, blockSize: *mut c_int, func: sys::CUfunction, blockSizeToDynamicSMemSize: sys::CUoccupancyB2DSize, dynamicSMemSize: usize, blockSizeLimit: c_int, flags: c_uint) }
            { 573 cuOccupancyMaxPotentialClusterSize "cuOccupancyMaxPotentialClusterSize" 11070 Legacy Other (clusterSize: *mut c_int, func: sys::CUfunction, config: *const sys::CUlaunchConfig) }
            { 574 cuParamSetSize "cuParamSetSize" 2000 Legacy Other (hfunc: sys::CUfunction, numbytes: c_uint) }
            { 575 cuParamSetTexRef "cuParamSetTexRef" 2000 Legacy Other (hfunc: sys::CUfunction, texunit: c_int, hTexRef: sys::CUtexref) }
            { 576 cuParamSetf "cuParamSetf" 2000 Legacy Other (hfunc: sys::CUfunction, offset: c_int, value: f32) }
            { 577 cuParamSeti "cuParamSeti" 2000 Legacy Other (hfunc: sys::CUfunction, offset: c_int, value: c_uint) }
            { 578 cuParamSetv "cuParamSetv" 2000 Legacy Other (hfunc: sys::CUfunction, offset: c_int, ptr: *mut c_void, numbytes: c_uint) }
            { 579 cuPointerGetAttribute "cuPointerGetAttribute" 4000 Legacy Info (data: *mut c_void, attribute: c_uint, ptr: CUdeviceptr) }
            { 580 cuPointerGetAttributes "cuPointerGetAttributes" 7000 Legacy Info (numAttributes: c_uint, attributes: *mut c_uint, data: *mut *mut c_void, ptr: CUdeviceptr) }
            { 581 cuPointerSetAttribute "cuPointerSetAttribute" 6000 Legacy Other (value: *const c_void, attribute: c_uint, ptr: CUdeviceptr) }
            { 582 cuProfilerInitialize "cuProfilerInitialize" 4000 Legacy Other (configFile: *const c_char, outputFile: *const c_char, outputMode: c_uint) }
            { 583 cuProfilerStart "cuProfilerStart" 4000 Legacy Other () }
            { 584 cuProfilerStop "cuProfilerStop" 4000 Legacy Other () }
            { 585 cuSignalExternalSemaphoresAsync "cuSignalExternalSemaphoresAsync" 10000 Legacy Sync (extSemArray: *const sys::CUexternalSemaphore, paramsArray: *const sys::CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, numExtSems: c_uint, stream: sys::CUstream) }
            { 586 cuSignalExternalSemaphoresAsync_ptsz "cuSignalExternalSemaphoresAsync" 10000 PerThread Sync (extSemArray: *const sys::CUexternalSemaphore, paramsArray: *const sys::CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, numExtSems: c_uint, stream: sys::CUstream) }
            { 587 cuStreamAddCallback "cuStreamAddCallback" 5000 Legacy Launch (hStream: sys::CUstream, callback: sys::CUstreamCallback, userData: *mut c_void, flags: c_uint) }
            { 588 cuStreamAddCallback_ptsz "cuStreamAddCallback" 7000 PerThread Launch (hStream: sys::CUstream, callback: sys::CUstreamCallback, userData: *mut c_void, flags: c_uint) }
            { 589 cuStreamAttachMemAsync "cuStreamAttachMemAsync" 6000 Legacy Other (hStream: sys::CUstream, dptr: CUdeviceptr, length: usize, flags: c_uint) }
            { 590 cuStreamAttachMemAsync_ptsz "cuStreamAttachMemAsync" 7000 PerThread Other (hStream: sys::CUstream, dptr: CUdeviceptr, length: usize, flags: c_uint) }
            { 591 cuStreamBatchMemOp "cuStreamBatchMemOp" 8000 Legacy Sync (stream: sys::CUstream, count: c_uint, paramArray: *mut sys::CUstreamBatchMemOpParams, flags: c_uint) }
            { 592 cuStreamBatchMemOp_v2 "cuStreamBatchMemOp" 11070 Legacy Sync (stream: sys::CUstream, count: c_uint, paramArray: *mut sys::CUstreamBatchMemOpParams, flags: c_uint) }
            { 593 cuStreamBatchMemOp_ptsz "cuStreamBatchMemOp" 8000 PerThread Sync (stream: sys::CUstream, count: c_uint, paramArray: *mut sys::CUstreamBatchMemOpParams, flags: c_uint) }
            { 594 cuStreamBatchMemOp_v2_ptsz "cuStreamBatchMemOp" 11070 PerThread Sync (stream: sys::CUstream, count: c_uint, paramArray: *mut sys::CUstreamBatchMemOpParams, flags: c_uint) }
            { 595 cuStreamBeginCapture "cuStreamBeginCapture" 10000 Legacy Capture (hStream: sys::CUstream) }
            { 596 cuStreamBeginCapture_v2 "cuStreamBeginCapture" 10010 Legacy Capture (hStream: sys::CUstream, mode: c_uint) }
            { 597 cuStreamBeginCapture_ptsz "cuStreamBeginCapture" 10000 PerThread Capture (hStream: sys::CUstream) }
            { 598 cuStreamBeginCapture_v2_ptsz "cuStreamBeginCapture" 10010 PerThread Capture (hStream: sys::CUstream, mode: c_uint) }
            { 599 cuStreamBeginCaptureToCig "cuStreamBeginCaptureToCig" 13010 Legacy Capture (hStream: sys::CUstream, streamCigCaptureParams: *mut sys::CUstreamCigCaptureParams) }
            { 600 cuStreamBeginCaptureToCig_ptsz "cuStreamBeginCaptureToCig" 13010 PerThread Capture (hStream: sys::CUstream, streamCigCaptureParams: *mut sys::CUstreamCigCaptureParams) }
            { 601 cuStreamBeginCaptureToGraph "cuStreamBeginCaptureToGraph" 12030 Legacy Capture (hStream: sys::CUstream, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, mode: c_uint) }
            { 602 cuStreamBeginCaptureToGraph_ptsz "cuStreamBeginCaptureToGraph" 12030 PerThread Capture (hStream: sys::CUstream, hGraph: sys::CUgraph, dependencies: *const sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, mode: c_uint) }
            { 603 cuStreamBeginRecaptureToGraph "cuStreamBeginRecaptureToGraph" 13030 Legacy Capture (hStream: sys::CUstream, mode: c_uint, hGraph: sys::CUgraph, callbackFunc: sys::CUgraphRecaptureCallback, userData: *mut c_void) }
            { 604 cuStreamBeginRecaptureToGraph_ptsz "cuStreamBeginRecaptureToGraph" 13030 PerThread Capture (hStream: sys::CUstream, mode: c_uint, hGraph: sys::CUgraph, callbackFunc: sys::CUgraphRecaptureCallback, userData: *mut c_void) }
            { 605 cuStreamCopyAttributes "cuStreamCopyAttributes" 11000 Legacy Other (dstStream: sys::CUstream, srcStream: sys::CUstream) }
            { 606 cuStreamCopyAttributes_ptsz "cuStreamCopyAttributes" 11000 PerThread Other (dst: sys::CUstream, src: sys::CUstream) }
            { 607 cuStreamCreate "cuStreamCreate" 2000 Legacy Context (phStream: *mut sys::CUstream, Flags: c_uint) }
            { 608 cuStreamCreateWithPriority "cuStreamCreateWithPriority" 5050 Legacy Context (phStream: *mut sys::CUstream, flags: c_uint, priority: c_int) }
            { 609 cuStreamDestroy "cuStreamDestroy" 2000 Legacy Context (hStream: sys::CUstream) }
            { 610 cuStreamDestroy_v2 "cuStreamDestroy" 4000 Legacy Context (hStream: sys::CUstream) }
            { 611 cuStreamEndCapture "cuStreamEndCapture" 10000 Legacy Capture (hStream: sys::CUstream, phGraph: *mut sys::CUgraph) }
            { 612 cuStreamEndCapture_ptsz "cuStreamEndCapture" 10000 PerThread Capture (hStream: sys::CUstream, phGraph: *mut sys::CUgraph) }
            { 613 cuStreamEndCaptureToCig "cuStreamEndCaptureToCig" 13010 Legacy Capture (hStream: sys::CUstream) }
            { 614 cuStreamEndCaptureToCig_ptsz "cuStreamEndCaptureToCig" 13010 PerThread Capture (hStream: sys::CUstream) }
            { 615 cuStreamGetAttribute "cuStreamGetAttribute" 11000 Legacy Other (hStream: sys::CUstream, attr: c_uint, value: *mut sys::CUstreamAttrValue) }
            { 616 cuStreamGetAttribute_ptsz "cuStreamGetAttribute" 11000 PerThread Other (hStream: sys::CUstream, attr: c_uint, value_out: *mut sys::CUstreamAttrValue) }
            { 617 cuStreamGetCaptureInfo "cuStreamGetCaptureInfo" 10010 Legacy Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64) }
            { 618 cuStreamGetCaptureInfo_v2 "cuStreamGetCaptureInfo" 11030 Legacy Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64, graph_out: *mut sys::CUgraph, dependencies_out: *mut *const sys::CUgraphNode, numDependencies_out: *mut usize) }
            { 619 cuStreamGetCaptureInfo_v3 "cuStreamGetCaptureInfo" 12030 Legacy Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64, graph_out: *mut sys::CUgraph, dependencies_out: *mut *const sys::CUgraphNode, edgeData_out: *mut *const sys::CUgraphEdgeData, numDependencies_out: *mut usize) }
            { 620 cuStreamGetCaptureInfo_ptsz "cuStreamGetCaptureInfo" 10010 PerThread Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64) }
            { 621 cuStreamGetCaptureInfo_v2_ptsz "cuStreamGetCaptureInfo" 11030 PerThread Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64, graph_out: *mut sys::CUgraph, dependencies_out: *mut *const sys::CUgraphNode, numDependencies_out: *mut usize) }
            { 622 cuStreamGetCaptureInfo_v3_ptsz "cuStreamGetCaptureInfo" 12030 PerThread Capture (hStream: sys::CUstream, captureStatus_out: *mut c_uint, id_out: *mut u64, graph_out: *mut sys::CUgraph, dependencies_out: *mut *const sys::CUgraphNode, edgeData_out: *mut *const sys::CUgraphEdgeData, numDependencies_out: *mut usize) }
            { 623 cuStreamGetCtx "cuStreamGetCtx" 9020 Legacy Context (hStream: sys::CUstream, pctx: *mut sys::CUcontext) }
            { 624 cuStreamGetCtx_v2 "cuStreamGetCtx" 12050 Legacy Context (hStream: sys::CUstream, pCtx: *mut sys::CUcontext, pGreenCtx: *mut sys::CUgreenCtx) }
            { 625 cuStreamGetCtx_ptsz "cuStreamGetCtx" 9020 PerThread Context (hStream: sys::CUstream, pctx: *mut sys::CUcontext) }
            { 626 cuStreamGetCtx_v2_ptsz "cuStreamGetCtx" 12050 PerThread Context (hStream: sys::CUstream, pCtx: *mut sys::CUcontext, pGreenCtx: *mut sys::CUgreenCtx) }
            { 627 cuStreamGetDevResource "cuStreamGetDevResource" 13010 Legacy Other (hStream: sys::CUstream, resource: *mut sys::CUdevResource, type_: c_uint) }
            { 628 cuStreamGetDevResource_ptsz "cuStreamGetDevResource" 13010 PerThread Other (hStream: sys::CUstream, resource: *mut sys::CUdevResource, type_: c_uint) }
            { 629 cuStreamGetDevice "cuStreamGetDevice" 12080 Legacy Context (hStream: sys::CUstream, device: *mut CUdevice) }
            { 630 cuStreamGetDevice_ptsz "cuStreamGetDevice" 12080 PerThread Context (hStream: sys::CUstream, device: *mut CUdevice) }
            { 631 cuStreamGetFlags "cuStreamGetFlags" 5050 Legacy Other (hStream: sys::CUstream, flags: *mut c_uint) }
            { 632 cuStreamGetFlags_ptsz "cuStreamGetFlags" 7000 PerThread Other (hStream: sys::CUstream, flags: *mut c_uint) }
            { 633 cuStreamGetGreenCtx "cuStreamGetGreenCtx" 12040 Legacy Context (hStream: sys::CUstream, phCtx: *mut sys::CUgreenCtx) }
            { 634 cuStreamGetId "cuStreamGetId" 12000 Legacy Other (hStream: sys::CUstream, streamId: *mut c_ulonglong) }
            { 635 cuStreamGetId_ptsz "cuStreamGetId" 12000 PerThread Other (hStream: sys::CUstream, streamId: *mut c_ulonglong) }
            { 636 cuStreamGetPriority "cuStreamGetPriority" 5050 Legacy Other (hStream: sys::CUstream, priority: *mut c_int) }
            { 637 cuStreamGetPriority_ptsz "cuStreamGetPriority" 7000 PerThread Other (hStream: sys::CUstream, priority: *mut c_int) }
            { 638 cuStreamIsCapturing "cuStreamIsCapturing" 10000 Legacy Capture (hStream: sys::CUstream, captureStatus: *mut c_uint) }
            { 639 cuStreamIsCapturing_ptsz "cuStreamIsCapturing" 10000 PerThread Capture (hStream: sys::CUstream, captureStatus: *mut c_uint) }
            { 640 cuStreamQuery "cuStreamQuery" 2000 Legacy Sync (hStream: sys::CUstream) }
            { 641 cuStreamQuery_ptsz "cuStreamQuery" 7000 PerThread Sync (hStream: sys::CUstream) }
            { 642 cuStreamSetAttribute "cuStreamSetAttribute" 11000 Legacy Other (hStream: sys::CUstream, attr: c_uint, param: *const sys::CUstreamAttrValue) }
            { 643 cuStreamSetAttribute_ptsz "cuStreamSetAttribute" 11000 PerThread Other (hStream: sys::CUstream, attr: c_uint, value: *const sys::CUstreamAttrValue) }
            { 644 cuStreamSynchronize "cuStreamSynchronize" 2000 Legacy Sync (hStream: sys::CUstream) }
            { 645 cuStreamSynchronize_ptsz "cuStreamSynchronize" 7000 PerThread Sync (hStream: sys::CUstream) }
            { 646 cuStreamUpdateCaptureDependencies "cuStreamUpdateCaptureDependencies" 11030 Legacy Capture (hStream: sys::CUstream, dependencies: *mut sys::CUgraphNode, numDependencies: usize, flags: c_uint) }
            { 647 cuStreamUpdateCaptureDependencies_v2 "cuStreamUpdateCaptureDependencies" 12030 Legacy Capture (hStream: sys::CUstream, dependencies: *mut sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, flags: c_uint) }
            { 648 cuStreamUpdateCaptureDependencies_ptsz "cuStreamUpdateCaptureDependencies" 11030 PerThread Capture (hStream: sys::CUstream, dependencies: *mut sys::CUgraphNode, numDependencies: usize, flags: c_uint) }
            { 649 cuStreamUpdateCaptureDependencies_v2_ptsz "cuStreamUpdateCaptureDependencies" 12030 PerThread Capture (hStream: sys::CUstream, dependencies: *mut sys::CUgraphNode, dependencyData: *const sys::CUgraphEdgeData, numDependencies: usize, flags: c_uint) }
            { 650 cuStreamWaitEvent "cuStreamWaitEvent" 3020 Legacy Sync (hStream: sys::CUstream, hEvent: sys::CUevent, Flags: c_uint) }
            { 651 cuStreamWaitEvent_ptsz "cuStreamWaitEvent" 7000 PerThread Sync (hStream: sys::CUstream, hEvent: sys::CUevent, Flags: c_uint) }
            { 652 cuStreamWaitValue32 "cuStreamWaitValue32" 8000 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 653 cuStreamWaitValue32_v2 "cuStreamWaitValue32" 11070 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 654 cuStreamWaitValue32_ptsz "cuStreamWaitValue32" 8000 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 655 cuStreamWaitValue32_v2_ptsz "cuStreamWaitValue32" 11070 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 656 cuStreamWaitValue64 "cuStreamWaitValue64" 9000 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 657 cuStreamWaitValue64_v2 "cuStreamWaitValue64" 11070 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 658 cuStreamWaitValue64_ptsz "cuStreamWaitValue64" 9000 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 659 cuStreamWaitValue64_v2_ptsz "cuStreamWaitValue64" 11070 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 660 cuStreamWriteValue32 "cuStreamWriteValue32" 8000 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 661 cuStreamWriteValue32_v2 "cuStreamWriteValue32" 11070 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 662 cuStreamWriteValue32_ptsz "cuStreamWriteValue32" 8000 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 663 cuStreamWriteValue32_v2_ptsz "cuStreamWriteValue32" 11070 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) }
            { 664 cuStreamWriteValue64 "cuStreamWriteValue64" 9000 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 665 cuStreamWriteValue64_v2 "cuStreamWriteValue64" 11070 Legacy Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 666 cuStreamWriteValue64_ptsz "cuStreamWriteValue64" 9000 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 667 cuStreamWriteValue64_v2_ptsz "cuStreamWriteValue64" 11070 PerThread Sync (stream: sys::CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) }
            { 668 cuSurfObjectCreate "cuSurfObjectCreate" 5000 Legacy Other (pSurfObject: *mut sys::CUsurfObject, pResDesc: *const sys::CUDA_RESOURCE_DESC) }
            { 669 cuSurfObjectDestroy "cuSurfObjectDestroy" 5000 Legacy Other (surfObject: sys::CUsurfObject) }
            { 670 cuSurfObjectGetResourceDesc "cuSurfObjectGetResourceDesc" 5000 Legacy Other (pResDesc: *mut sys::CUDA_RESOURCE_DESC, surfObject: sys::CUsurfObject) }
            { 671 cuSurfRefGetArray "cuSurfRefGetArray" 3000 Legacy Other (phArray: *mut sys::CUarray, hSurfRef: sys::CUsurfref) }
            { 672 cuSurfRefSetArray "cuSurfRefSetArray" 3000 Legacy Other (hSurfRef: sys::CUsurfref, hArray: sys::CUarray, Flags: c_uint) }
            { 673 cuTensorMapEncodeIm2col "cuTensorMapEncodeIm2col" 12000 Legacy Other (tensorMap: *mut sys::CUtensorMap, tensorDataType: c_uint, tensorRank: u32, globalAddress: *mut c_void, globalDim: *const u64, globalStrides: *const u64, pixelBoxLowerCorner: *const c_int, pixelBoxUpperCorner: *const c_int, channelsPerPixel: u32, pixelsPerColumn: u32, elementStrides: *const u32, interleave: c_uint, swizzle: c_uint, l2Promotion: c_uint, oobFill: c_uint) }
            { 674 cuTensorMapEncodeIm2colWide "cuTensorMapEncodeIm2colWide" 12080 Legacy Other (tensorMap: *mut sys::CUtensorMap, tensorDataType: c_uint, tensorRank: u32, globalAddress: *mut c_void, globalDim: *const u64, globalStrides: *const u64, pixelBoxLowerCornerWidth: c_int, pixelBoxUpperCornerWidth: c_int, channelsPerPixel: u32, pixelsPerColumn: u32, elementStrides: *const u32, interleave: c_uint, mode: c_uint, swizzle: c_uint, l2Promotion: c_uint, oobFill: c_uint) }
            { 675 cuTensorMapEncodeTiled "cuTensorMapEncodeTiled" 12000 Legacy Other (tensorMap: *mut sys::CUtensorMap, tensorDataType: c_uint, tensorRank: u32, globalAddress: *mut c_void, globalDim: *const u64, globalStrides: *const u64, boxDim: *const u32, elementStrides: *const u32, interleave: c_uint, swizzle: c_uint, l2Promotion: c_uint, oobFill: c_uint) }
            { 676 cuTensorMapReplaceAddress "cuTensorMapReplaceAddress" 12000 Legacy Other (tensorMap: *mut sys::CUtensorMap, globalAddress: *mut c_void) }
            { 677 cuTensorMapSetAllocationClass "cuTensorMapSetAllocationClass" 13050 Legacy Other (tensorMap: *mut sys::CUtensorMap, allocClass: c_uint, outAllocClass: *mut c_void) }
            { 678 cuTexObjectCreate "cuTexObjectCreate" 5000 Legacy Other (pTexObject: *mut sys::CUtexObject, pResDesc: *const sys::CUDA_RESOURCE_DESC, pTexDesc: *const sys::CUDA_TEXTURE_DESC, pResViewDesc: *const sys::CUDA_RESOURCE_VIEW_DESC) }
            { 679 cuTexObjectDestroy "cuTexObjectDestroy" 5000 Legacy Other (texObject: sys::CUtexObject) }
            { 680 cuTexObjectGetResourceDesc "cuTexObjectGetResourceDesc" 5000 Legacy Other (pResDesc: *mut sys::CUDA_RESOURCE_DESC, texObject: sys::CUtexObject) }
            { 681 cuTexObjectGetResourceViewDesc "cuTexObjectGetResourceViewDesc" 5000 Legacy Other (pResViewDesc: *mut sys::CUDA_RESOURCE_VIEW_DESC, texObject: sys::CUtexObject) }
            { 682 cuTexObjectGetTextureDesc "cuTexObjectGetTextureDesc" 5000 Legacy Other (pTexDesc: *mut sys::CUDA_TEXTURE_DESC, texObject: sys::CUtexObject) }
            { 683 cuTexRefCreate "cuTexRefCreate" 2000 Legacy Other (pTexRef: *mut sys::CUtexref) }
            { 684 cuTexRefDestroy "cuTexRefDestroy" 2000 Legacy Other (hTexRef: sys::CUtexref) }
            { 685 cuTexRefGetAddress "cuTexRefGetAddress" 2000 Legacy Other (pdptr: *mut c_uint, hTexRef: sys::CUtexref) }
            { 686 cuTexRefGetAddress_v2 "cuTexRefGetAddress" 3020 Legacy Other (pdptr: *mut CUdeviceptr, hTexRef: sys::CUtexref) }
            { 687 cuTexRefGetAddressMode "cuTexRefGetAddressMode" 2000 Legacy Other (pam: *mut c_uint, hTexRef: sys::CUtexref, dim: c_int) }
            { 688 cuTexRefGetArray "cuTexRefGetArray" 2000 Legacy Other (phArray: *mut sys::CUarray, hTexRef: sys::CUtexref) }
            { 689 cuTexRefGetBorderColor "cuTexRefGetBorderColor" 8000 Legacy Other (pBorderColor: *mut f32, hTexRef: sys::CUtexref) }
            { 690 cuTexRefGetFilterMode "cuTexRefGetFilterMode" 2000 Legacy Other (pfm: *mut c_uint, hTexRef: sys::CUtexref) }
            { 691 cuTexRefGetFlags "cuTexRefGetFlags" 2000 Legacy Other (pFlags: *mut c_uint, hTexRef: sys::CUtexref) }
            { 692 cuTexRefGetFormat "cuTexRefGetFormat" 2000 Legacy Other (pFormat: *mut c_uint, pNumChannels: *mut c_int, hTexRef: sys::CUtexref) }
            { 693 cuTexRefGetMaxAnisotropy "cuTexRefGetMaxAnisotropy" 5000 Legacy Other (pmaxAniso: *mut c_int, hTexRef: sys::CUtexref) }
            { 694 cuTexRefGetMipmapFilterMode "cuTexRefGetMipmapFilterMode" 5000 Legacy Other (pfm: *mut c_uint, hTexRef: sys::CUtexref) }
            { 695 cuTexRefGetMipmapLevelBias "cuTexRefGetMipmapLevelBias" 5000 Legacy Other (pbias: *mut f32, hTexRef: sys::CUtexref) }
            { 696 cuTexRefGetMipmapLevelClamp "cuTexRefGetMipmapLevelClamp" 5000 Legacy Other (pminMipmapLevelClamp: *mut f32, pmaxMipmapLevelClamp: *mut f32, hTexRef: sys::CUtexref) }
            { 697 cuTexRefGetMipmappedArray "cuTexRefGetMipmappedArray" 5000 Legacy Other (phMipmappedArray: *mut sys::CUmipmappedArray, hTexRef: sys::CUtexref) }
            { 698 cuTexRefSetAddress "cuTexRefSetAddress" 2000 Legacy Other (ByteOffset: *mut c_uint, hTexRef: sys::CUtexref, dptr: c_uint, bytes: c_uint) }
            { 699 cuTexRefSetAddress_v2 "cuTexRefSetAddress" 3020 Legacy Other (ByteOffset: *mut usize, hTexRef: sys::CUtexref, dptr: CUdeviceptr, bytes: usize) }
            { 700 cuTexRefSetAddress2D "cuTexRefSetAddress2D" 2020 Legacy Other (hTexRef: sys::CUtexref, desc: *const c_void, dptr: c_uint, Pitch: c_uint) }
            { 701 cuTexRefSetAddress2D_v2 "cuTexRefSetAddress2D" 3020 Legacy Other (hTexRef: sys::CUtexref, desc: *const sys::CUDA_ARRAY_DESCRIPTOR, dptr: CUdeviceptr, Pitch: usize) }
            { 702 cuTexRefSetAddress2D_v3 "cuTexRefSetAddress2D" 4010 Legacy Other (hTexRef: sys::CUtexref, desc: *const sys::CUDA_ARRAY_DESCRIPTOR, dptr: CUdeviceptr, Pitch: usize) }
            { 703 cuTexRefSetAddressMode "cuTexRefSetAddressMode" 2000 Legacy Other (hTexRef: sys::CUtexref, dim: c_int, am: c_uint) }
            { 704 cuTexRefSetArray "cuTexRefSetArray" 2000 Legacy Other (hTexRef: sys::CUtexref, hArray: sys::CUarray, Flags: c_uint) }
            { 705 cuTexRefSetBorderColor "cuTexRefSetBorderColor" 8000 Legacy Other (hTexRef: sys::CUtexref, pBorderColor: *mut f32) }
            { 706 cuTexRefSetFilterMode "cuTexRefSetFilterMode" 2000 Legacy Other (hTexRef: sys::CUtexref, fm: c_uint) }
            { 707 cuTexRefSetFlags "cuTexRefSetFlags" 2000 Legacy Other (hTexRef: sys::CUtexref, Flags: c_uint) }
            { 708 cuTexRefSetFormat "cuTexRefSetFormat" 2000 Legacy Other (hTexRef: sys::CUtexref, fmt: c_uint, NumPackedComponents: c_int) }
            { 709 cuTexRefSetMaxAnisotropy "cuTexRefSetMaxAnisotropy" 5000 Legacy Other (hTexRef: sys::CUtexref, maxAniso: c_uint) }
            { 710 cuTexRefSetMipmapFilterMode "cuTexRefSetMipmapFilterMode" 5000 Legacy Other (hTexRef: sys::CUtexref, fm: c_uint) }
            { 711 cuTexRefSetMipmapLevelBias "cuTexRefSetMipmapLevelBias" 5000 Legacy Other (hTexRef: sys::CUtexref, bias: f32) }
            { 712 cuTexRefSetMipmapLevelClamp "cuTexRefSetMipmapLevelClamp" 5000 Legacy Other (hTexRef: sys::CUtexref, minMipmapLevelClamp: f32, maxMipmapLevelClamp: f32) }
            { 713 cuTexRefSetMipmappedArray "cuTexRefSetMipmappedArray" 5000 Legacy Other (hTexRef: sys::CUtexref, hMipmappedArray: sys::CUmipmappedArray, Flags: c_uint) }
            { 714 cuThreadExchangeStreamCaptureMode "cuThreadExchangeStreamCaptureMode" 10010 Legacy Capture (mode: *mut c_uint) }
            { 715 cuUserObjectCreate "cuUserObjectCreate" 11030 Legacy Graph (object_out: *mut sys::CUuserObject, ptr: *mut c_void, destroy: sys::CUhostFn, initialRefcount: c_uint, flags: c_uint) }
            { 716 cuUserObjectRelease "cuUserObjectRelease" 11030 Legacy Graph (object: sys::CUuserObject, count: c_uint) }
            { 717 cuUserObjectRetain "cuUserObjectRetain" 11030 Legacy Graph (object: sys::CUuserObject, count: c_uint) }
            { 718 cuVDPAUCtxCreate "cuVDPAUCtxCreate" 3010 Legacy Ipc (pCtx: *mut sys::CUcontext, flags: c_uint, device: CUdevice, vdpDevice: u32, vdpGetProcAddress: *mut c_void) }
            { 719 cuVDPAUCtxCreate_v2 "cuVDPAUCtxCreate" 3020 Legacy Ipc (pCtx: *mut sys::CUcontext, flags: c_uint, device: CUdevice, vdpDevice: u32, vdpGetProcAddress: *mut c_void) }
            { 720 cuVDPAUGetDevice "cuVDPAUGetDevice" 3010 Legacy Ipc (pDevice: *mut CUdevice, vdpDevice: u32, vdpGetProcAddress: *mut c_void) }
            { 721 cuWaitExternalSemaphoresAsync "cuWaitExternalSemaphoresAsync" 10000 Legacy Sync (extSemArray: *const sys::CUexternalSemaphore, paramsArray: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, numExtSems: c_uint, stream: sys::CUstream) }
            { 722 cuWaitExternalSemaphoresAsync_ptsz "cuWaitExternalSemaphoresAsync" 10000 PerThread Sync (extSemArray: *const sys::CUexternalSemaphore, paramsArray: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, numExtSems: c_uint, stream: sys::CUstream) }
        }
    };
}
