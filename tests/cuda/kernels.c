/* Devices, kernels and what is read back from the CUDA libraries. No kernel runs; launches are counted and checked. */
#include "runtime.h"

static _Thread_local cudaError_t last_error;
cudaError_t failed(cudaError_t error) { return last_error = error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t e) { return e ? "cudaError" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "error";
    }
}
int runtime_trace(const char *name) { /* also the body of every function that build.py writes */
    static int on = -1;
    if (on < 0) on = getenv("RUNTIME_TRACE") != NULL;
    if (on) fprintf(stderr, "runtime: %s\n", name);
    return 0;
}

/* ---- devices */
static _Thread_local int current;
static const char *capabilities(void) {
    const char *text = getenv("RUNTIME_CAPABILITIES");
    return text && *text ? text : "9.0";
}
int num_devices(void) {
    int n = 1;
    for (const char *c = capabilities(); *c; c++) n += *c == ',';
    return n;
}
int capability(int device) {
    const char *text = capabilities();
    int major = 9, minor = 0;
    while (device-- > 0 && strchr(text, ',')) text = strchr(text, ',') + 1;
    sscanf(text, "%d.%d", &major, &minor);
    return major * 10 + minor;
}
cudaError_t cudaGetDeviceCount(int *n) { *n = num_devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { current = d; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
static int attribute(int which, int device) {
    switch (which) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrL2CacheSize: return 50 << 20;
        case cudaDevAttrComputeCapabilityMajor: return capability(device) / 10;
        case cudaDevAttrComputeCapabilityMinor: return capability(device) % 10;
        case cudaDevAttrClockRate: case cudaDevAttrMemoryClockRate: return 1000000;
        case cudaDevAttrGlobalMemoryBusWidth: return 5120;
        case cudaDevAttrTextureAlignment: return 512;
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrConcurrentKernels:
        case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrManagedMemory: return 1;
        default: return 0;
    }
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a, d); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    p->major = capability(d) / 10, p->minor = capability(d) % 10;
    snprintf(p->name, sizeof p->name, "no device (%d.%d)", p->major, p->minor);
    p->uuid.bytes[0] = (char)d;
    p->totalGlobalMem = 80ul << 30;
    p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->reservedSharedMemPerBlock = 1024, p->l2CacheSize = 50 << 20, p->textureAlignment = 512;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->memoryBusWidth = 5120, p->unifiedAddressing = 1, p->managedMemory = 1, p->cooperativeLaunch = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int d) { snprintf(text, n, "0000:%02x:00.0", d); return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }

/* ---- kernels */
long runtime_launches;
static _Thread_local struct { dim3 grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *b) { static void *binary; return &binary; }
void __cudaRegisterFatBinaryEnd(void **b) {}
void __cudaUnregisterFatBinary(void **b) {}
void __cudaRegisterFunction(void **b, const char *f, char *df, const char *n, int l, void *t, void *x, void *y, void *z, int *w) {}
void __cudaRegisterVar(void **b, char *v, char *d, const char *n, int e, size_t s, int c, int g) {}
char __cudaInitModule(void **b) { return 0; }
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
static cudaError_t launch(dim3 g, dim3 b) {
    __sync_add_and_fetch(&runtime_launches, 1);
    runtime_trace("launch");
    if (!(g.x && g.y && g.z && b.x && b.y && b.z) || g.y > 65535 || g.z > 65535 || b.x * b.y * b.z > 1024)
        return failed(cudaErrorInvalidConfiguration);
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { return launch(g, b); }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { return launch(g, b); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch(c->gridDim, c->blockDim); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    static const int compiled_for[] = {75, 80, 86, 90, 100, 120}; /* torch's builds for CUDA 13; CUB knows no others */
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->maxDynamicSharedSizeBytes = 232448;
    for (int i = 0; i < 6; i++)
        if (compiled_for[i] <= capability(current)) a->ptxVersion = a->binaryVersion = compiled_for[i];
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned x) { *n = 1; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned x) { f(s, cudaSuccess, data); return cudaSuccess; }

/* ---- driver */
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long x, enum cudaDriverEntryPointQueryResult *r) {
    runtime_trace(n);
    *f = (void *)nothing;
    if (r) *r = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { *v = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = num_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute((int)a, d); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = new_handle(); return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)(uintptr_t)0x10; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = current; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult r, const char **text) { *text = "error"; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = new_handle(); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = new_handle(); return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
    *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned m,
                        CUstream s, void **p, void **e) {
    dim3 g = {gx, gy, gz}, b = {bx, by, bz};
    return launch(g, b) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
    return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, 0, NULL, p, e);
}

/* ---- cuBLAS: handles and what is read back */
int cublasCreate_v2(void **h) { *h = new_handle(); return 0; }
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int c, int s) { *d = new_handle(); return 0; }
int cublasLtMatrixLayoutCreate(void **d, int t, uint64_t r, uint64_t c, int64_t ld) { *d = new_handle(); return 0; }
int cublasLtMatmulPreferenceCreate(void **p) { *p = new_handle(); return 0; }
/* cublasLtMatmulHeuristicResult_t: 64 bytes of algorithm, then workspace size, state, waves. */
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p, int n, struct heuristic *r, int *found) {
    memset(r, 0, sizeof *r);
    *found = 1;
    return 0;
}
