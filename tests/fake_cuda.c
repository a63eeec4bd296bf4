/* A libcuda.so.1 whose memory is counted in files, for tests of benchmarks/gpu without a GPU.
 *
 * FAKE_CUDA_FOLDER holds one file a process, named by its pid and locked while it lives:
 *
 *   <uuid> <compute|mps> <bytes> <SM utilisation, -1: no kernel has run>
 *
 * fake_nvml.c reads them on top of its table, which also names the memory of each device. Kernels do
 * nothing: one whose PTX has an entry "spin" takes its 20 ms, one with "fault" ends as an illegal
 * address does and leaves XID FAKE_CUDA_XID (31) in the file "xids". As with a real driver, a context
 * costs memory, an allocation beyond what is free is refused, and not every PTX target is compiled.
 * A kernel "work" takes 10 ns a round as its events tell it, and as often that as there are processes
 * that run some: MPS clients only if they use more than half of the SMs. FAKE_CUDA_NO_TURNS: once.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int ret;
typedef unsigned long long u64;
enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_PTX = 218, ILLEGAL_ADDRESS = 700 };
enum { CONTEXT_MIB = 300, SMS = 132 };

static char uuid[80];
static u64 held;
static int own = -1, sm = -1, pending, working;
static u64 rounds;

static const char *folder(void) { return getenv("FAKE_CUDA_FOLDER"); }

static int locked(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s/lock", folder());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    flock(fd, LOCK_EX);
    return fd;
}

static void tell(void)
{
    char line[160];
    const char *kind = getenv("CUDA_MPS_PIPE_DIRECTORY") ? "mps" : "compute";
    int length = snprintf(line, sizeof line, "%s %s %20llu %4d\n", uuid, kind, held, sm);
    if (pwrite(own, line, (size_t)length, 0) != length)
        abort();
}

/* What the table says of the device. */
static void sizes(u64 *total, u64 *free_bytes)
{
    char line[512], name[80];
    u64 reserved;
    FILE *file = fopen(getenv("FAKE_NVML_TABLE"), "r");
    *total = *free_bytes = 0;
    while (file && fgets(line, sizeof line, file)) {
        u64 all, left;
        if (sscanf(line, "device %79s %llu %llu %llu", name, &all, &reserved, &left) == 4 &&
            !strcmp(name, uuid))
            *total = all, *free_bytes = left;
    }
    if (file)
        fclose(file);
}

static u64 held_by_all(void)
{
    char path[512], name[80], kind[16];
    u64 sum = 0, one;
    struct dirent *entry;
    DIR *dir = opendir(folder());
    while (dir && (entry = readdir(dir))) {
        if (!strtoul(entry->d_name, NULL, 10))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder(), entry->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
        if (!file)
            continue;
        int lives = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
        if (lives && fscanf(file, "%79s %15s %llu", name, kind, &one) == 3 && !strcmp(name, uuid))
            sum += one;
        fclose(file);
    }
    if (dir)
        closedir(dir);
    return sum;
}

/* Most that this process may have, as an MPS client. */
static u64 limit(void)
{
    char path[512];
    const char *daemon = getenv("CUDA_MPS_PIPE_DIRECTORY"), *own_limit = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    u64 most = ~0ULL, mib;
    if (!daemon || getenv("FAKE_CUDA_UNLIMITED"))
        return most;
    snprintf(path, sizeof path, "%s/limit", daemon);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%lluM", &mib) == 1)
        most = mib << 20;
    if (file)
        fclose(file);
    if (own_limit && sscanf(own_limit, "0=%lluM", &mib) == 1 && mib << 20 < most)
        most = mib << 20;
    return most;
}

static ret take(u64 size)
{
    u64 total, free_bytes;
    int lock = locked();
    sizes(&total, &free_bytes);
    ret r = OUT_OF_MEMORY;
    if (getenv("FAKE_CUDA_ENDLESS") || (held_by_all() + size <= free_bytes && held + size <= limit()))
        held += size, tell(), r = OK;
    close(lock);
    return r;
}

ret cuInit(unsigned flags) { (void)flags; return getenv("FAKE_CUDA_FAILS") ? NO_DEVICE : OK; }
ret cuDeviceGet(int *to, int ordinal) { *to = ordinal; return getenv("CUDA_VISIBLE_DEVICES") ? OK : NO_DEVICE; }

ret cuDevicePrimaryCtxRetain(void **to, int device)
{
    char path[512];
    (void)device;
    snprintf(uuid, sizeof uuid, "%s", getenv("CUDA_VISIBLE_DEVICES"));
    snprintf(path, sizeof path, "%s/%d", folder(), getpid());
    own = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    flock(own, LOCK_EX);
    tell();
    *to = &own;
    return take((u64)CONTEXT_MIB << 20);
}
ret cuCtxSetCurrent(void *context) { (void)context; return OK; }
ret cuMemAlloc_v2(u64 *to, size_t size) { *to = 0x7f0000000000ULL + held; return take(size); }

ret cuMemGetInfo_v2(size_t *free_bytes, size_t *all)
{
    u64 total, left;
    sizes(&total, &left);
    *free_bytes = left - held_by_all(), *all = total;
    return OK;
}

ret cuModuleLoadData(void **to, const char *image)
{
    *to = strstr(image, ".entry fault") ? "fault" : strstr(image, ".entry work") ? "work" : "spin";
    return strstr(image, "sm_70") ? INVALID_PTX : OK;
}
ret cuModuleGetFunction(void **to, void *module, const char *name)
{
    *to = module;
    return strcmp(module, name) ? NO_DEVICE : OK;
}

ret cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty,
                   unsigned tz, unsigned shared, void *stream, void **parameters, void **extra)
{
    char path[512];
    (void)y, (void)z, (void)threads, (void)ty, (void)tz, (void)shared, (void)stream;
    (void)extra;
    working = !strcmp(function, "work");
    if (working)
        rounds = *(u64 *)parameters[0];
    if (strcmp(function, "fault")) {
        sm = blocks >= SMS ? 100 : (int)(blocks * 100 / SMS);
        tell();
        return OK;
    }
    snprintf(path, sizeof path, "%s/xids", folder());
    FILE *file = fopen(path, "a");
    fprintf(file, "%s %s\n", uuid, getenv("FAKE_CUDA_XID") ? getenv("FAKE_CUDA_XID") : "31");
    fclose(file);
    pending = ILLEGAL_ADDRESS;
    return OK;
}

/* Number of processes that ran a kernel "work" a short time ago; their files are named so. */
static int working_now(void)
{
    struct stat found;
    struct timespec now;
    struct dirent *entry;
    char path[512];
    int count = 0;
    snprintf(path, sizeof path, "%s/work-%d", folder(), getpid());
    close(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    utimensat(AT_FDCWD, path, NULL, 0);
    clock_gettime(CLOCK_REALTIME, &now);
    DIR *dir = opendir(folder());
    while (dir && (entry = readdir(dir))) {
        snprintf(path, sizeof path, "%s/%s", folder(), entry->d_name);
        if (!strncmp(entry->d_name, "work-", 5) && !stat(path, &found))
            count += now.tv_sec + now.tv_nsec * 1e-9 - found.st_mtim.tv_sec - found.st_mtim.tv_nsec * 1e-9 < 0.3;
    }
    if (dir)
        closedir(dir);
    return count;
}

ret cuCtxSynchronize(void)
{
    usleep(working ? 5000 : 20000);
    return pending;
}
ret cuEventCreate(void **to, unsigned flags) { (void)flags; *to = &rounds; return OK; }
ret cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return OK; }
ret cuEventElapsedTime(float *to_ms, void *since, void *until)
{
    (void)since, (void)until;
    int shares = (getenv("CUDA_MPS_PIPE_DIRECTORY") && sm <= 50) || getenv("FAKE_CUDA_NO_TURNS");
    *to_ms = (float)rounds * 1e-5F * (float)(shares ? 1 : working_now());
    return OK;
}
ret cuDeviceGetAttribute(int *to, int attribute, int device)
{
    (void)device;
    *to = attribute == 16 ? SMS : 0;
    return OK;
}

ret cuGetErrorName(ret code, const char **to)
{
    *to = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
        : code == INVALID_PTX ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_NO_DEVICE";
    return OK;
}
