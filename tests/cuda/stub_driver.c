/* A libcuda.so.1 of one GPU that computes nothing: memory is the process's, launches are told to stderr.
   test_bindings.py runs numflow's runtime over it through cuda.bindings as they are published. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef QUIET /* host_time.py: nothing is told, and a launch's arguments are not looked at */
#define fprintf(...)
#endif

typedef unsigned long long address;
static int the_context;
static void *room(size_t n) { return aligned_alloc(256, (n + 255) / 256 * 256); }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "stub"); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &the_context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return context == &the_context ? 0 : 201; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { return 704; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = room(8); return flags == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) { fprintf(stderr, "capture %d\n", mode); return 0; }
int cuStreamEndCapture(void *stream, void **graph) { *graph = room(8); return 0; }
int cuGraphInstantiateWithFlags(void **made, void *graph, address flags) { *made = room(8); return flags ? 1 : 0; }
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *made) { free(made); return 0; }
int cuGraphLaunch(void *made, void *stream) { fprintf(stderr, "replay\n"); return 0; }
int cuMemAlloc_v2(address *at, size_t n) { *at = (address)room(n); return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 7000; *total = 8000; return 0; }
int cuMemFree_v2(address at) { free((void *)at); return 0; }
int cuMemHostAlloc(void **at, size_t n, unsigned flags) { *at = room(n); return 0; }
int cuMemFreeHost(void *at) { free(at); return 0; }
int cuMemcpyAsync(address to, address from, size_t n, void *stream) { memcpy((void *)to, (void *)from, n); return 0; }
int cuMemcpyPeerAsync(address to, void *its, address from, void *other, size_t n, void *stream) {
    fprintf(stderr, "peer %zu\n", n);
    memcpy((void *)to, (void *)from, n);
    return its == &the_context && other == &the_context ? 0 : 201;
}
int cuEventCreate(void **event, unsigned flags) { *event = room(8); return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventElapsedTime_v2(float *ms, void *begin, void *end) { *ms = 1.5f; return 0; }
int cuEventElapsedTime(float *ms, void *begin, void *end) { *ms = 1.5f; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = room(8); return memcmp(image, "image", 5) ? 2 : 0; }
int cuModuleUnload(void *module) { free(module); return 0; }
int cuModuleGetFunction(void **found, void *module, const char *name) { *found = strdup(name); return 0; }
int cuFuncSetAttribute(char *name, int which, int value) { return which == 8 ? 0 : 1; }
int cuLaunchKernel(char *name, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                   unsigned shared, void *stream, void **values, void **extra) {
    fprintf(stderr, "%s %u %u %u, %u %u %u, %u: %llu %u %g %d %llu\n", name, x, y, z, threads, b, c, shared,
            *(address *)values[0] % 256, *(unsigned *)values[1], *(float *)values[2], *(int *)values[3],
            *(address *)values[4]);
    return extra ? 1 : 0;
}
struct config { unsigned x, y, z, threads, b, c, shared; void *stream, *attributes; unsigned count; };
int cuLaunchKernelEx(struct config *how, char *name, void **values, void **extra) {
    struct { int id, padding; unsigned value[16]; } *attribute = how->attributes;
    for (unsigned i = 0; i < how->count; i++, attribute++)
        if (attribute->id == 6 && attribute->value[0] == 1) fprintf(stderr, "dependent ");
        else if (attribute->id == 4) fprintf(stderr, "clusters of %u %u %u ", attribute->value[0], attribute->value[1],
                                             attribute->value[2]);
        else return 1;
    if (!how->count) return 1;
    return cuLaunchKernel(name, how->x, how->y, how->z, how->threads, how->b, how->c, how->shared, how->stream,
                          values, extra);
}
int cuGetErrorName(int code, const char **text) { *text = "error"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "error"; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, address flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    char newer[200];
    snprintf(newer, sizeof newer, "%s%s", name, strcmp(name, "cuGraphInstantiate") ? "_v2" : "WithFlags");
    *found = dlsym(self, newer);
    if (!*found) *found = dlsym(self, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
