// What candle calls of CUDA, and the CPU's driver (tests/cpu_driver) does not have: handles of cuBLAS and cuRAND, which tests make but do
// not use, and copies of memory that is not pinned. The driver's copies read and write the host's memory when their turn comes, as CUDA does with
// pinned memory alone.

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// Names are macros, for what they are called now.
#define STRING(name) #name
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, STRING(name)))

static struct {
    const char* begin;
    size_t bytes;
} pinned[1 << 16];
static size_t pinned_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is_pinned(const char* memory) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < pinned_count; i++) found |= memory >= pinned[i].begin && memory < pinned[i].begin + pinned[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

CUresult cuMemHostAlloc(void** to, size_t bytes, unsigned flags) {
    const CUresult result = NEXT(cuMemHostAlloc)(to, bytes, flags);
    pthread_mutex_lock(&lock);
    if (pinned_count == sizeof(pinned) / sizeof(*pinned)) abort();
    pinned[pinned_count].begin = *to;
    pinned[pinned_count++].bytes = bytes;
    pthread_mutex_unlock(&lock);
    return result;
}

// Tests end before what is staged need be freed.
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    if (is_pinned(from)) return NEXT(cuMemcpyHtoDAsync)(to, from, bytes, stream);
    void* staged = malloc(bytes + 1);
    return NEXT(cuMemcpyHtoDAsync)(to, memcpy(staged, from, bytes), bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    const CUresult result = NEXT(cuMemcpyDtoHAsync)(to, from, bytes, stream);
    return result != CUDA_SUCCESS || is_pinned(to) ? result : cuStreamSynchronize(stream);
}

CUresult cuMemAllocAsync(CUdeviceptr* to, size_t bytes, CUstream stream) {
    (void)stream;
    return cuMemAlloc(to, bytes + !bytes);
}

CUresult cuStreamCreate(CUstream* to, unsigned flags) { return cuStreamCreateWithPriority(to, flags, 0); }
CUresult cuCtxDestroy(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule* to, const char* file) { return (void)to, (void)file, CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream) {
    return (void)to, (void)to_context, (void)from, (void)from_context, (void)bytes, (void)stream, CUDA_ERROR_NOT_SUPPORTED;
}

// 0 is success.
int cublasCreate_v2(void** to) { return *to = to, 0; }
int cublasDestroy_v2(void* handle) { return (void)handle, 0; }
int cublasSetStream_v2(void* handle, void* stream) { return (void)handle, (void)stream, 0; }
int curandCreateGenerator(void** to, int type) { return *to = to, (void)type, 0; }
int curandDestroyGenerator(void* generator) { return (void)generator, 0; }
int curandSetPseudoRandomGeneratorSeed(void* generator, unsigned long long seed) { return (void)generator, (void)seed, 0; }
int curandSetStream(void* generator, void* stream) { return (void)generator, (void)stream, 0; }
