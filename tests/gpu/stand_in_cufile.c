/* libcufile.so.0 without a device, beside stand_in_cuda.c: reads go to host memory, and are counted
   in the file STAND_IN_STATS as those of the kernel's module are. With STAND_IN_FAILS "open" the
   driver does not start; with a number, that read, counted from 1, returns -5, or with a
   minus before it -1 and an error of the system. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int error, cuda_error; } Error;
typedef struct { int type; union { int fd; void *other; } handle; const void *operations; } Description;

static int n_reads, n_files, compat_mode = 1;

static void tell(void) {
    FILE *file = fopen(getenv("STAND_IN_STATS"), "w");
    fprintf(file, "Reads : err=0 n=%d ok=%d readMiB=1\n", n_reads, n_reads);
    fclose(file);
}
static Error result(int code) { return (Error){code, 0}; }
static const char *fails(void) { return getenv("STAND_IN_FAILS") ? getenv("STAND_IN_FAILS") : ""; }

/* Files that are registered; for tests. */
int stand_in_files(void) { return n_files; }

Error cuFileSetParameterBool(int parameter, bool value) {
    if (parameter == 1) compat_mode = value;
    return result(0);
}
Error cuFileDriverOpen(void) { tell(); return result(compat_mode || !strcmp(fails(), "open") ? 5001 : 0); }
Error cuFileDriverOpen_v2(void) { return cuFileDriverOpen(); }
Error cuFileHandleRegister(void **handle, Description *described) {
    if (described->type != 1 || described->operations) return result(5022);
    *handle = (void *)(size_t)(described->handle.fd + 1000);
    n_files++;
    return result(0);
}
void cuFileHandleDeregister(void *handle) { n_files--; }
ssize_t cuFileRead(void *handle, void *base, size_t n_bytes, off_t offset, off_t at) {
    char path[64];
    if (++n_reads == atoi(fails())) return -5;
    if (n_reads == -atoi(fails())) return errno = EINVAL, -1;
    tell();
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(size_t)handle - 1000);
    int descriptor = open(path, O_RDONLY); /* not O_DIRECT: cuFile takes any offset and length */
    ssize_t n_read = pread(descriptor, (char *)base + at, n_bytes, offset);
    close(descriptor);
    return n_read;
}
