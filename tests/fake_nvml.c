/* A libnvidia-ml.so.1 whose devices are a text file, for tests of the agent through the real pynvml.
 *
 * The file is named by FAKE_NVML_TABLE and read again at every call, so a test may change it (by
 * rename) while the agent runs. One statement a line:
 *
 *   driver 580.95.05
 *   code <function> <NVML code>                   every call of the function answers the code
 *   device <uuid> <total> <reserved> <free> <name, to the end of the line>
 *   mig <uuid> <gpu instance> <compute instance> <total> <reserved> <free> <name>   of that device
 *   process <compute|graphics|mps> <pid> <bytes|na>                      of the last device or mig
 *   fail <function|all> <NVML code>                                      of the last device or mig
 *   xid <number>                                  an event of the last device, told once
 *
 * Sizes are bytes. "fail all 15" is a lost GPU: it is counted, but gives no handle. As in the real
 * library, lists that do not fit answer INSUFFICIENT_SIZE with the size, structs carry a version
 * that is checked, v1's `used` includes the reserve, and nothing works before nvmlInit.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret;
typedef unsigned long long u64;
enum { OK = 0, UNINIT = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       TIMEOUT = 10, VERSION = 25, UNKNOWN = 999 };
enum { COMPUTE, GRAPHICS, MPS };

typedef struct { unsigned pid; u64 used; unsigned gi, ci; } process; /* nvmlProcessInfo_v2 = _v3 */
typedef struct { u64 total, free, used; } memory_v1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
typedef struct { char function[64]; int code; } failure;
typedef struct {
    char uuid[80], name[96];
    u64 total, reserved, free;
    int parent; /* -1: a physical GPU */
    unsigned gi, ci;
    process processes[3][512];
    unsigned count[3];
    failure failures[8];
    unsigned failed;
    u64 xids[32];
    unsigned raised;
} device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci;
typedef struct { device *device; u64 kind, xid; unsigned gi, ci; } event;

static device table[64];
static int devices, initialised;
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static unsigned told[64]; /* XIDs of each device */
static failure codes[32];
static unsigned coded;
static char driver[80];

static void load(void)
{
    const char *path = getenv("FAKE_NVML_TABLE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], word[64], kind[16], bytes[32];
    int code, gpu = -1;
    devices = 0, coded = 0;
    strcpy(driver, "580.95.05");
    while (file && fgets(line, sizeof line, file)) {
        device *last = devices ? &table[devices - 1] : NULL, *next = &table[devices];
        unsigned pid, gi, ci;
        u64 xid;
        if (line[0] == '#' || line[0] == '\n')
            continue;
        if (sscanf(line, "driver %79s", driver) == 1)
            continue;
        if (sscanf(line, "code %63s %d", codes[coded].function, &codes[coded].code) == 2) {
            coded++;
        } else if (sscanf(line, "fail %63s %d", word, &code) == 2 && last) {
            strcpy(last->failures[last->failed].function, word);
            last->failures[last->failed++].code = code;
        } else if (sscanf(line, "xid %llu", &xid) == 1 && last) {
            last->xids[last->raised++] = xid;
        } else if (sscanf(line, "process %15s %u %31s", kind, &pid, bytes) == 3 && last) {
            int list = !strcmp(kind, "mps") ? MPS : !strcmp(kind, "graphics") ? GRAPHICS : COMPUTE;
            u64 used = !strcmp(bytes, "na") ? ~0ULL : strtoull(bytes, NULL, 10);
            process p = {pid, used, last->parent < 0 ? ~0U : last->gi, last->parent < 0 ? ~0U : last->ci};
            last->processes[list][last->count[list]++] = p;
        } else {
            memset(next, 0, sizeof *next);
            next->parent = -1;
            if (sscanf(line, "device %79s %llu %llu %llu %95[^\n]", next->uuid, &next->total,
                       &next->reserved, &next->free, next->name) == 5) {
                gpu = devices++;
            } else if (sscanf(line, "mig %79s %u %u %llu %llu %llu %95[^\n]", next->uuid, &gi, &ci,
                              &next->total, &next->reserved, &next->free, next->name) == 7) {
                next->gi = gi, next->ci = ci, next->parent = gpu;
                devices++;
            } else {
                fprintf(stderr, "fake_nvml: %s: cannot read: %s", path, line);
                abort();
            }
        }
    }
    if (file)
        fclose(file);
}

/* What the table says a call answers before it does anything. */
static ret enter(const char *function, device *d)
{
    load();
    for (unsigned i = 0; i < coded; i++)
        if (!strcmp(codes[i].function, function))
            return codes[i].code;
    if (!initialised)
        return UNINIT;
    if (!d)
        return OK;
    if (d < table || d >= table + devices)
        return INVALID;
    for (unsigned i = 0; i < d->failed; i++)
        if (!strcmp(d->failures[i].function, function) || !strcmp(d->failures[i].function, "all"))
            return d->failures[i].code;
    return OK;
}
static void unlock(int *held) { (void)held; pthread_mutex_unlock(&mutex); }
/* To the end of the block that it stands in, no other thread reads the table again. */
#define ENTER_(d, line) \
    __attribute__((cleanup(unlock))) int held_##line = pthread_mutex_lock(&mutex); \
    (void)held_##line; \
    do { ret r_ = enter(__func__, d); if (r_) return r_; } while (0)
#define ENTER__(d, line) ENTER_(d, line)
#define ENTER(d) ENTER__(d, __LINE__)

static ret text(const char *from, char *to, unsigned size)
{
    if (strlen(from) >= size)
        return TOO_SMALL;
    strcpy(to, from);
    return OK;
}

/* The n-th device below parent (-1: the n-th GPU), or NULL. */
static device *nth(int parent, unsigned n)
{
    for (int i = 0; i < devices; i++)
        if (table[i].parent == parent && n-- == 0)
            return &table[i];
    return NULL;
}

static ret list(device *d, int kind, unsigned *count, process *out)
{
    unsigned room = *count;
    *count = d->count[kind];
    if (room < d->count[kind])
        return TOO_SMALL;
    memcpy(out, d->processes[kind], d->count[kind] * sizeof *out);
    return OK;
}

ret nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&mutex);
    ret r = enter(__func__, NULL);
    if (!r || r == UNINIT)
        initialised++, r = OK;
    pthread_mutex_unlock(&mutex);
    return r;
}
ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ret nvmlShutdown(void) { ENTER(NULL); initialised--; return OK; }
const char *nvmlErrorString(ret code) { (void)code; return "an error that only this driver knows"; }
ret nvmlSystemGetDriverVersion(char *to, unsigned size) { ENTER(NULL); return text(driver, to, size); }
ret nvmlSystemGetCudaDriverVersion_v2(int *to) { ENTER(NULL); *to = 13000; return OK; }
ret nvmlSystemGetCudaDriverVersion(int *to) { ENTER(NULL); *to = 13000; return OK; }

ret nvmlDeviceGetCount_v2(unsigned *to)
{
    ENTER(NULL);
    for (*to = 0; nth(-1, *to); ++*to)
        ;
    return OK;
}

ret nvmlDeviceGetHandleByIndex_v2(unsigned index, device **to)
{
    ENTER(NULL);
    device *d = nth(-1, index);
    if (!d)
        return INVALID;
    ENTER(d);
    *to = d;
    return OK;
}

ret nvmlDeviceGetHandleByUUID(const char *uuid, device **to)
{
    ENTER(NULL);
    for (int i = 0; i < devices; i++)
        if (!strcmp(table[i].uuid, uuid)) {
            ENTER(&table[i]);
            *to = &table[i];
            return OK;
        }
    return NOT_FOUND;
}

ret nvmlDeviceGetName(device *d, char *to, unsigned size) { ENTER(d); return text(d->name, to, size); }
ret nvmlDeviceGetUUID(device *d, char *to, unsigned size) { ENTER(d); return text(d->uuid, to, size); }

ret nvmlDeviceGetIndex(device *d, unsigned *to)
{
    ENTER(d);
    for (*to = 0; nth(d->parent, *to) != d; ++*to)
        ;
    return OK;
}

ret nvmlDeviceGetMemoryInfo(device *d, memory_v1 *to)
{
    ENTER(d);
    memory_v1 m = {d->total, d->free, d->total - d->free};
    *to = m;
    return OK;
}

ret nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *to)
{
    ENTER(d);
    if (to->version != (sizeof *to | 2U << 24))
        return VERSION;
    memory_v2 m = {to->version, d->total, d->reserved, d->free, d->total - d->free - d->reserved};
    *to = m;
    return OK;
}

ret nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *n, process *to) { ENTER(d); return list(d, COMPUTE, n, to); }
ret nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *n, process *to) { ENTER(d); return list(d, GRAPHICS, n, to); }
ret nvmlDeviceGetMPSComputeRunningProcesses_v3(device *d, unsigned *n, process *to) { ENTER(d); return list(d, MPS, n, to); }
/* An older driver has only these. */
ret nvmlDeviceGetComputeRunningProcesses_v2(device *d, unsigned *n, process *to) { ENTER(d); return list(d, COMPUTE, n, to); }

ret nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending)
{
    ENTER(d);
    if (d->parent >= 0 || strstr(d->name, "GeForce"))
        return UNSUPPORTED;
    *now = *pending = nth((int)(d - table), 0) != NULL;
    return OK;
}

ret nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *to) { ENTER(d); *to = 7; return OK; }

ret nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **to)
{
    ENTER(d);
    *to = nth((int)(d - table), index);
    return *to ? OK : NOT_FOUND;
}

ret nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *d, device **to)
{
    ENTER(d);
    if (d->parent < 0)
        return INVALID;
    *to = &table[d->parent];
    return OK;
}

ret nvmlDeviceGetGpuInstanceId(device *d, unsigned *to) { ENTER(d); *to = d->gi; return d->parent < 0 ? UNSUPPORTED : OK; }
ret nvmlDeviceGetComputeInstanceId(device *d, unsigned *to) { ENTER(d); *to = d->ci; return d->parent < 0 ? UNSUPPORTED : OK; }

/* What else NVIDIA's device plugin asks. */
ret nvmlDeviceGetMinorNumber(device *d, unsigned *to) { return nvmlDeviceGetIndex(d, to); }
ret nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) { ENTER(d); *major = 9; *minor = 0; return OK; }

ret nvmlDeviceGetPciInfo_v3(device *d, pci *to)
{
    unsigned index;
    ret r = nvmlDeviceGetIndex(d, &index);
    if (r)
        return r;
    memset(to, 0, sizeof *to);
    to->bus = index + 1;
    snprintf(to->legacy, sizeof to->legacy, "0000:%02X:00.0", to->bus);
    snprintf(to->address, sizeof to->address, "00000000:%02X:00.0", to->bus);
    return OK;
}

ret nvmlDeviceGetTopologyCommonAncestor(device *d, device *other, int *to) { ENTER(d); (void)other; *to = 40; return OK; }
ret nvmlDeviceGetNvLinkState(device *d, unsigned link, int *to) { ENTER(d); (void)link; (void)to; return UNSUPPORTED; }

ret nvmlEventSetCreate(void **to) { ENTER(NULL); *to = &mutex; return OK; }
ret nvmlEventSetFree(void *set) { (void)set; return OK; }
ret nvmlDeviceGetSupportedEventTypes(device *d, u64 *to) { ENTER(d); *to = 8; return OK; } /* XIDs */
ret nvmlDeviceRegisterEvents(device *d, u64 kinds, void *set) { ENTER(d); (void)kinds; (void)set; return OK; }

static ret next_event(event *to)
{
    ENTER(NULL);
    for (int i = 0; i < devices; i++)
        if (told[i] < table[i].raised) {
            event e = {&table[i], 8, table[i].xids[told[i]++], ~0U, ~0U};
            *to = e;
            return OK;
        }
    return TIMEOUT;
}

ret nvmlEventSetWait_v2(void *set, event *to, unsigned timeout_ms)
{
    ret r;
    (void)set;
    for (unsigned waited = 0; (r = next_event(to)) == TIMEOUT && waited < timeout_ms; waited += 50)
        usleep(50000);
    return r;
}
