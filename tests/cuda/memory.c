/* Memory, copies, streams, events and graphs: all that says when the host waits. */
#include "runtime.h"
#include <pthread.h>
#include <sys/mman.h>

/* ---- the listener in Python */
typedef void (*listener_t)(const char *, long);
static listener_t listener;
static _Thread_local int inside;
void runtime_listen(listener_t new_listener) { listener = new_listener; }
void tell(const char *what, long which) {
    runtime_trace(what);
    if (listener && !inside) {
        inside = 1;
        listener(what, which);
        inside = 0;
    }
}

/* ---- allocation: pages that the kernel gives when they are first touched; where they began lies in front */
#define FRONT (2ul << 20)
#define RANGES 65536
enum kind { PAGEABLE, PINNED, DEVICE };
static struct { char *start, *end; enum kind kind; } ranges[RANGES];
static int num_ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t reserve(void **out, size_t bytes, enum kind kind) {
    size_t all = bytes + 2 * FRONT;
    char *start = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    char *given = (char *)(((uintptr_t)start + 2 * FRONT - 1) / FRONT * FRONT);
    if (given - start < 16) given += FRONT;
    ((void **)given)[-1] = start;
    ((size_t *)given)[-2] = all;
    pthread_mutex_lock(&lock);
    int free_place = 0;
    while (free_place < num_ranges && ranges[free_place].start) free_place++;
    if (free_place == RANGES) abort();
    ranges[free_place].start = given, ranges[free_place].end = given + bytes, ranges[free_place].kind = kind;
    if (free_place == num_ranges) num_ranges++;
    pthread_mutex_unlock(&lock);
    *out = given;
    return cudaSuccess;
}
static void release(void *given) {
    if (!given) return;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].start == given) ranges[i].start = ranges[i].end = NULL;
    pthread_mutex_unlock(&lock);
    munmap(((void **)given)[-1], ((size_t *)given)[-2]);
}
static enum kind kind_of(const void *pointer) {
    enum kind found = PAGEABLE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].start && (char *)pointer >= ranges[i].start && (char *)pointer < ranges[i].end) found = ranges[i].kind;
    pthread_mutex_unlock(&lock);
    return found;
}
cudaError_t cudaMalloc(void **out, size_t bytes) { return reserve(out, bytes, DEVICE); }
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t s) { return reserve(out, bytes, DEVICE); }
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return reserve(out, bytes, PINNED); }
cudaError_t cudaFree(void *p) { tell("cudaFree", 0); release(p); return cudaSuccess; } /* waits for the whole device */
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { release(p); return cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { release(p); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { *free_bytes = *total = 80ul << 30; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice};
    enum kind kind = kind_of(p);
    memset(a, 0, sizeof *a);
    a->type = types[kind];
    a->devicePointer = kind == PAGEABLE ? NULL : (void *)p;
    a->hostPointer = kind == PINNED ? (void *)p : NULL;
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { memset(p, v, n); return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) { static char place[1 << 20]; *out = place; return cudaSuccess; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr p) {
    *(uint64_t *)value = which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? p : 0;
    return CUDA_SUCCESS;
}

/* ---- graphs: streams under capture, and events that carry the capture to other streams */
#define MANY 256
static void *captured[MANY], *carriers[MANY];
static int num_captured, num_carriers;
long runtime_capture; /* number of the last one */
static long broken;
static int among(void *const *set, int n, const void *one) {
    for (int i = 0; i < n; i++)
        if (set[i] == one) return 1;
    return 0;
}
static void add(void **set, int *n, void *one) {
    if (!among(set, *n, one) && *n < MANY) set[(*n)++] = one;
}
static int is_captured(cudaStream_t s) { return num_captured && among(captured, num_captured, s); }
/* Numbers of the events recorded so far, and of the last one that the host knows to be done. */
static long now, done;
/* What a device refuses while a stream is captured; the capture is lost with it. */
static cudaError_t unless_captured(int refused, const char *what) {
    if (num_captured && refused) {
        broken = runtime_capture;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    done = now;
    tell(what, 0);
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    if (num_captured || !s) return failed(cudaErrorStreamCaptureUnsupported);
    num_carriers = 0, runtime_capture++;
    add(captured, &num_captured, s);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    if (!is_captured(s)) return failed(cudaErrorStreamCaptureUnmatched);
    num_captured = num_carriers = 0;
    *graph = (cudaGraph_t)runtime_capture;
    return broken == runtime_capture ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = is_captured(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    if (id) *id = runtime_capture;
    if (graph) *graph = (cudaGraph_t)runtime_capture;
    if (n) *n = 0;
    return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    *exec = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) { tell("cudaGraphLaunch", (long)exec); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return cudaSuccess; }

/* ---- copies */
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t s) {
    if (!bytes) return cudaSuccess;
    memmove(to, from, bytes);
    /* Into pageable memory it always waits, whatever the caller asked for. */
    if (kind_of(from) == DEVICE && kind_of(to) == PAGEABLE) return unless_captured(is_captured(s), "copy to pageable memory");
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    memmove(to, from, n);
    return unless_captured(1, "cudaMemcpy");
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { return copy(to, from, n, s); }
cudaError_t cudaMemcpyPeerAsync(void *to, int td, const void *from, int fd, size_t n, cudaStream_t s) { return copy(to, from, n, s); }
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}

/* ---- waiting */
cudaError_t cudaDeviceSynchronize(void) { return unless_captured(1, "cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return unless_captured(is_captured(s), "cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return unless_captured(among(carriers, num_carriers, e), "cudaEventSynchronize"); }

/* ---- streams and events */
static uintptr_t handles = 0x1000;
void *new_handle(void) { return (void *)__sync_add_and_fetch(&handles, 16); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = new_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = new_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = new_handle(); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    if (num_captured && among(carriers, num_carriers, e)) add(captured, &num_captured, s);
    return cudaSuccess;
}
/* The device is as late as it may be: what an event follows is done once the host has waited for anything later. */
struct event { long recorded; };
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = (cudaEvent_t)calloc(1, sizeof(struct event)); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return ((struct event *)e)->recorded <= done ? cudaSuccess : failed(cudaErrorNotReady); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    ((struct event *)e)->recorded = __sync_add_and_fetch(&now, 1);
    if (is_captured(s)) add(carriers, &num_carriers, e);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }
