/* libcuda.so.1 without a device, for tests of how its functions are called: device memory is host
   memory, work is done at once. It refuses what a driver would refuse: copies beyond what was
   allocated, host memory that is not registered, handles that are not there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;
enum { MANY = 4096, INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_CONTEXT = 201, ILLEGAL_STATE = 401 };

static struct { size_t begin, n_bytes; } device[MANY], host[MANY];
static size_t used_bytes, total_bytes = (size_t)1 << 32;
static int n_streams, n_events, states[MANY], last_lock_ms = -1; /* states: by process */
static __thread int has_context, pushed;

static int inside(const void *table, size_t begin, size_t n_bytes) {
    const size_t(*rows)[2] = table;
    for (int i = 0; i < MANY; i++)
        if (rows[i][1] && begin >= rows[i][0] && begin + n_bytes <= rows[i][0] + rows[i][1]) return 1;
    return 0;
}
static int count(const void *table) {
    const size_t(*rows)[2] = table;
    int n = 0;
    for (int i = 0; i < MANY; i++) n += rows[i][1] != 0;
    return n;
}
/* What was given and not taken back; for tests. */
int stand_in_left(void) { return count(device) + count(host) + n_streams + n_events; }
int stand_in_lock_ms(void) { return last_lock_ms; }
int stand_in_state(int pid) { return states[pid % MANY]; }

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuGetErrorName(Result code, const char **name) {
    *name = code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STAND_IN";
    return 0;
}
Result cuGetErrorString(Result code, const char **text) { *text = "it was told to"; return 0; }
Result cuDeviceGetCount(int *n) { *n = 1; return 0; }
Result cuDeviceGet(int *found, int number) { *found = number; return number ? INVALID_VALUE : 0; }
Result cuDeviceGetName(char *name, int size, int number) { snprintf(name, size, "Stand-in"); return 0; }
Result cuDeviceGetPCIBusId(char *id, int size, int number) { snprintf(id, size, "0000:7F:00.0"); return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int number) { /* compute capability 9.0 */
    *value = attribute == 75 ? 9 : 0;
    return 0;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int number) { *bytes = total_bytes; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int number) { *context = (void *)0x1000; return 0; }
Result cuCtxSetCurrent(void *context) { has_context = context != 0; return 0; }
Result cuCtxPushCurrent_v2(void *context) { pushed++; return context ? 0 : INVALID_VALUE; }
Result cuCtxPopCurrent_v2(void **context) { pushed--; *context = (void *)0x1000; return 0; }
#define NEEDS_CONTEXT if (!has_context && !pushed) return INVALID_CONTEXT

Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    NEEDS_CONTEXT;
    *free_bytes = total_bytes - used_bytes;
    *total = total_bytes;
    return 0;
}
Result cuMemAlloc_v2(Pointer *pointer, size_t n_bytes) {
    NEEDS_CONTEXT;
    if (n_bytes > total_bytes - used_bytes) return NO_MEMORY;
    for (int i = 0; i < MANY; i++)
        if (!device[i].n_bytes) {
            void *memory = aligned_alloc(65536, (n_bytes + 65535) / 65536 * 65536);
            memset(memory, 0xdb, n_bytes);
            device[i].begin = (size_t)memory;
            device[i].n_bytes = n_bytes;
            used_bytes += n_bytes;
            *pointer = (Pointer)(size_t)memory;
            return 0;
        }
    return NO_MEMORY;
}
Result cuMemFree_v2(Pointer pointer) {
    NEEDS_CONTEXT;
    for (int i = 0; i < MANY; i++)
        if (device[i].n_bytes && device[i].begin == pointer) {
            used_bytes -= device[i].n_bytes;
            device[i].n_bytes = 0;
            free((void *)(size_t)pointer);
            return 0;
        }
    return INVALID_VALUE;
}
Result cuMemHostRegister_v2(void *memory, size_t n_bytes, unsigned flags) {
    NEEDS_CONTEXT;
    for (int i = 0; i < MANY; i++)
        if (!host[i].n_bytes) {
            host[i].begin = (size_t)memory;
            host[i].n_bytes = n_bytes;
            return (size_t)memory % 4096 || flags != 3 ? INVALID_VALUE : 0;
        }
    return NO_MEMORY;
}
Result cuMemHostUnregister(void *memory) {
    NEEDS_CONTEXT;
    for (int i = 0; i < MANY; i++)
        if (host[i].n_bytes && host[i].begin == (size_t)memory) return host[i].n_bytes = 0;
    return INVALID_VALUE;
}
Result cuMemHostGetDevicePointer_v2(Pointer *pointer, void *memory, unsigned flags) {
    NEEDS_CONTEXT;
    *pointer = (Pointer)(size_t)memory;
    return flags || !inside(host, (size_t)memory, 1) ? INVALID_VALUE : 0;
}
Result cuStreamCreate(void **stream, unsigned flags) {
    NEEDS_CONTEXT;
    n_streams++;
    *stream = (void *)0x2000;
    return flags == 1 ? 0 : INVALID_VALUE;
}
Result cuStreamDestroy_v2(void *stream) { n_streams--; return stream == (void *)0x2000 ? 0 : INVALID_VALUE; }
Result cuStreamSynchronize(void *stream) { return stream == (void *)0x2000 ? 0 : INVALID_VALUE; }
Result cuEventCreate(void **event, unsigned flags) {
    NEEDS_CONTEXT;
    n_events++;
    *event = (void *)0x3000;
    return flags == 3 ? 0 : INVALID_VALUE;
}
Result cuEventDestroy_v2(void *event) { n_events--; return event == (void *)0x3000 ? 0 : INVALID_VALUE; }
Result cuEventRecord(void *event, void *stream) {
    return event == (void *)0x3000 && stream == (void *)0x2000 ? 0 : INVALID_VALUE;
}
Result cuEventQuery(void *event) { return event == (void *)0x3000 ? 0 : INVALID_VALUE; }
Result cuEventSynchronize(void *event) { return event == (void *)0x3000 ? 0 : INVALID_VALUE; }

static Result copy(size_t to, int to_device, size_t from, int from_device, size_t n_bytes) {
    if (!inside(to_device ? (void *)device : (void *)host, to, n_bytes)) return INVALID_VALUE;
    if (!inside(from_device ? (void *)device : (void *)host, from, n_bytes)) return INVALID_VALUE;
    memcpy((void *)to, (void *)from, n_bytes);
    return 0;
}
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t n_bytes, void *stream) {
    return copy(to, 1, (size_t)from, 0, n_bytes);
}
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t n_bytes, void *stream) {
    return copy((size_t)to, 0, from, 1, n_bytes);
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t n_bytes, void *stream) {
    return copy(to, 1, from, 1, n_bytes);
}
Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t n_bytes) { /* pageable memory too */
    NEEDS_CONTEXT;
    if (!inside(device, to, n_bytes)) return INVALID_VALUE;
    memcpy((void *)(size_t)to, from, n_bytes);
    return 0;
}
Result cuMemsetD8Async(Pointer to, unsigned char value, size_t n_bytes, void *stream) {
    if (!inside(device, to, n_bytes)) return INVALID_VALUE;
    memset((void *)(size_t)to, value, n_bytes);
    return 0;
}

/* The only kernel is that of restore.cuda_hasher: its source, compiled for the CPU, is the library
   STAND_IN_KERNEL. Without that launches do nothing. */
typedef void Kernel(const void *staged, const void *rows, unsigned n, unsigned first, void *status);
static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;

Result cuModuleLoadData(void **module, const void *image) { *module = (void *)0x4000; return 0; }
Result cuModuleUnload(void *module) { return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    const char *path = getenv("STAND_IN_KERNEL");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    *function = library ? dlsym(library, "run") : (void *)0x5000;
    return *function && !strcmp(name, "check") ? 0 : INVALID_VALUE;
}
Result cuLaunchKernel(
    void *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
    unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **given,
    void **extra
) {
    if (block != 256 || grid_y * grid_z * block_y * block_z != 1 || extra) return INVALID_VALUE;
    if (function == (void *)0x5000) return 0;
    pthread_mutex_lock(&launching);
    ((Kernel *)function)(
        *(void **)given[0], *(void **)given[1], grid, *(unsigned *)given[2], *(void **)given[3]
    );
    pthread_mutex_unlock(&launching);
    return 0;
}

/* Process 7 can be locked and not frozen; the states are those of CUprocessState. */
Result cuCheckpointProcessLock(int pid, unsigned *arguments) {
    if (states[pid % MANY]) return ILLEGAL_STATE;
    last_lock_ms = arguments ? (int)arguments[0] : 0;
    states[pid % MANY] = 1;
    return 0;
}
Result cuCheckpointProcessCheckpoint(int pid, void *arguments) {
    if (states[pid % MANY] != 1 || arguments || pid == 7) return ILLEGAL_STATE;
    states[pid % MANY] = 2;
    return 0;
}
Result cuCheckpointProcessUnlock(int pid, void *arguments) {
    if (states[pid % MANY] != 1) return ILLEGAL_STATE;
    states[pid % MANY] = 0;
    return 0;
}
Result cuCheckpointProcessGetState(int pid, int *found) { *found = states[pid % MANY]; return 0; }

Result cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    char second[256];
    Dl_info here;
    dladdr((void *)cuInit, &here);
    void *self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(second, sizeof second, "%s_v2", name);
    *found = dlsym(self, second);
    if (!*found) *found = dlsym(self, name);
    if (status) *status = !*found;
    return 0;
}
Result cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
