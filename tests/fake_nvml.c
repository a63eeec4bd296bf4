/* A libnvidia-ml.so.1 whose devices are a text file, for tests of the agent through the real pynvml.
 *
 * The file is named by FAKE_NVML_TABLE and read again when it is another, so a test may change it (by
 * rename) while the agent runs. One statement a line. About the whole driver:
 *
 *   driver 580.95.05        its version; a process that was initialised under another one is told
 *                           LIB_RM_VERSION_MISMATCH until it is replaced; "none": not loaded
 *   library 580.95.05       the version of this file, where it is not that of the driver
 *   cuda 13000
 *   entries <bytes>         what _v3 of the process lists writes for each: 24, as nvml.h says, or 16 or 32
 *   field <NVML code>       how it answers fields that it does not have; 0: it has the recovery action
 *   code <function> <NVML code>                   every call of the function answers the code
 *   hang <function>                               no call of it returns while this stands here
 *   device <uuid> <total> <reserved> <free> <name, to the end of the line>
 *   mig <uuid> <gpu instance> <compute instance> <total> <reserved> <free> <name>   of that device
 *
 * About the last device or mig:
 *
 *   process <compute|graphics|mps> <pid> <bytes|na>
 *   fail <function|all> <NVML code>
 *   stuck <function|all>                          no call of it for the device returns
 *   arch <nvmlDeviceArchitecture>                 9, Hopper, where it is not said
 *   mode <nvmlComputeMode>
 *   util <percent>                                time with any kernel
 *   sm <percent> <percent>                        GPM: SM utilisation and occupancy
 *   busy <pid> <percent> <microseconds>           SM utilisation of a process, and when
 *   ecc <count>                                   uncorrected and volatile
 *   remap <pending> <failed>                      rows; Ampere and newer
 *   pages <0|1>                                   pending retirement; Turing and older
 *   recovery <action>                             what the driver asks for; absent: cannot tell
 *   nvlink <PCI address>                          of the GPU or switch at the other end of its next link
 *   limit <cgroup directory> <soft> <hard> <used> r615; "max": none
 *   xid <number>                                  an event, told once to each process that lives
 *
 * Sizes are bytes. "fail all 15" is a lost GPU: it is counted, but gives no handle. As in the real
 * library, lists that do not fit answer INSUFFICIENT_SIZE with the size, structs carry a version
 * that is checked, v1's `used` includes the reserve, nothing works before nvmlInit, GPM begins with
 * Hopper, wants 100 ms between samples and knows what was allocated, and an XID that was raised
 * before a process came is lost to it, and GPUs that come after nvmlInit are not seen until
 * nvmlShutdown. It has FAKE_NVML_DEVICE open from nvmlInit to nvmlShutdown,
 * as the real one has /dev/nvidia0.
 *
 * FAKE_CUDA_FOLDER, if set, is where fake_cuda.c keeps what its processes hold: their memory, kernels
 * and XIDs come on top of the table. FAKE_NVML_BALLAST_MIB is memory that nvmlInit takes.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int ret;
typedef unsigned long long u64;
enum { OK = 0, UNINIT = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       NOT_LOADED = 9, TIMEOUT = 10, MISMATCH = 18, NO_DATA = 21, VERSION = 25, UNKNOWN = 999 };
enum { COMPUTE, GRAPHICS, MPS };
enum { TURING = 6, AMPERE = 7, HOPPER = 9 };
enum { XID_EVENTS = 8, MOST_SAMPLES = 100 };
#define NOBODY (~0U)
#define ABSENT (-1)
#define STUCK (-1) /* stands for no code: the call does not return */

/* --- what nvml.h defines */

typedef struct { unsigned pid; u64 used; unsigned gi, ci; } process; /* nvmlProcessInfo_v2 = _v3 */
typedef struct { unsigned pid; u64 at; unsigned sm, memory, encoder, decoder; } busy;
typedef struct { u64 total, free, used; } memory_v1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned sms, engines[5], gpu_slices, compute_slices; u64 mib; } attributes;
typedef struct { unsigned id, p2p, slices, count, sms, engines[5]; u64 mib; } gpu_profile;
typedef struct { unsigned id, slices, count, sms, engines[5]; } compute_profile;
typedef struct { const char *space; u64 soft, hard, used; } limits;
typedef struct { unsigned id; ret code; double value; const char *info[3]; } metric;
typedef struct { unsigned version, count; struct sample *first, *second; metric metrics[]; } comparison;
typedef struct { unsigned version, supported; } support;
typedef struct {
    unsigned id, scope;
    long long at, latency;
    int type;
    ret code;
    union { double d; unsigned ui; u64 ull; } value;
} field;

/* --- what the table says */

typedef struct { char function[64]; int code; } answer;
typedef struct {
    char uuid[80], name[96];
    u64 total, reserved, free;
    int parent; /* ABSENT: a physical GPU */
    unsigned gi, ci;
    process processes[3][512];
    unsigned count[3];
    busy busy[64];
    unsigned busies;
    answer answers[8];
    unsigned answered;
    int arch, mode, util, sm, occupancy, ecc, pending, failed, pages, recovery;
    struct { char space[256]; u64 soft, hard, used; } limits[8];
    unsigned limited;
    u64 xids[32];
    unsigned raised;
    char links[18][32];
    unsigned linked;
} device;
typedef struct { device *device; u64 kind, xid; unsigned gi, ci; } event;
struct sample { unsigned magic; double sm, occupancy; struct timespec at; };
enum { MAGIC = 0x6770 };

static device table[64];
static int devices;
static answer answers[32];
static unsigned answered;
static char driver[80], library[80];
static int cuda;
static unsigned entry_bytes; /* of process lists v3 */
static int field_code;

/* --- what the process remembers */

static int initialised;
static int opened = -1;
static void *ballast;
static unsigned counted; /* GPUs that were there when it was initialised */
static char since[80]; /* the driver that it was initialised under */
static unsigned told[64]; /* XIDs of each device */
static int samples; /* that were allocated and not freed */
static int born;
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int depth; /* how often its holder has it */

/* --- reading the table */

static u64 bytes(const char *word)
{
    return !strcmp(word, "na") || !strcmp(word, "max") ? ~0ULL : strtoull(word, NULL, 10);
}

static void add(answer *list, unsigned *count, const char *function, int code)
{
    strcpy(list[*count].function, function);
    list[(*count)++].code = code;
}

static int read_driver(const char *line)
{
    char word[64];
    int code;
    if (sscanf(line, "driver %79s", driver) == 1 || sscanf(line, "library %79s", library) == 1 ||
        sscanf(line, "cuda %d", &cuda) == 1 || sscanf(line, "entries %u", &entry_bytes) == 1 ||
        sscanf(line, "field %d", &field_code) == 1)
        return 1;
    if (sscanf(line, "code %63s %d", word, &code) == 2)
        return add(answers, &answered, word, code), 1;
    if (sscanf(line, "hang %63s", word) == 1)
        return add(answers, &answered, word, STUCK), 1;
    return 0;
}

static int read_device(const char *line, int *gpu)
{
    device *d = &table[devices];
    memset(d, 0, sizeof *d);
    d->arch = HOPPER;
    d->util = d->sm = d->recovery = ABSENT;
    d->parent = ABSENT;
    if (sscanf(line, "device %79s %llu %llu %llu %95[^\n]", d->uuid, &d->total, &d->reserved, &d->free,
               d->name) == 5)
        return *gpu = devices++, 1;
    if (sscanf(line, "mig %79s %u %u %llu %llu %llu %95[^\n]", d->uuid, &d->gi, &d->ci, &d->total,
               &d->reserved, &d->free, d->name) == 7)
        return d->parent = *gpu, devices++, 1;
    return 0;
}

/* Thousands of lines are of this kind, and sscanf is slow. */
static int read_process(const char *line, device *d)
{
    char *at, list = line[8];
    if (strncmp(line, "process ", 8) || !(at = strchr(line + 8, ' ')))
        return 0;
    int kind = list == 'm' ? MPS : list == 'g' ? GRAPHICS : COMPUTE;
    process p = {(unsigned)strtoul(at, &at, 10), 0, NOBODY, NOBODY};
    if (d->parent >= 0)
        p.gi = d->gi, p.ci = d->ci;
    at[strcspn(at, "\n")] = 0;
    p.used = bytes(at + 1);
    return d->processes[kind][d->count[kind]++] = p, 1;
}

static int read_detail(const char *line, device *d)
{
    char word[256], first[32], second[32], third[32];
    int code;
    unsigned pid;
    u64 at;
    if (sscanf(line, "fail %63s %d", word, &code) == 2)
        return add(d->answers, &d->answered, word, code), 1;
    if (sscanf(line, "stuck %63s", word) == 1)
        return add(d->answers, &d->answered, word, STUCK), 1;
    if (sscanf(line, "xid %llu", &at) == 1)
        return d->xids[d->raised++] = at, 1;
    if (sscanf(line, "busy %u %d %llu", &pid, &code, &at) == 3) {
        busy b = {pid, at, (unsigned)code, 0, 0, 0};
        return d->busy[d->busies++] = b, 1;
    }
    if (d->linked < 18 && sscanf(line, "nvlink %31s", d->links[d->linked]) == 1)
        return d->linked++, 1;
    if (sscanf(line, "limit %255s %31s %31s %31s", word, first, second, third) == 4) {
        strcpy(d->limits[d->limited].space, word);
        d->limits[d->limited].soft = bytes(first);
        d->limits[d->limited].hard = bytes(second);
        d->limits[d->limited++].used = bytes(third);
        return 1;
    }
    return sscanf(line, "arch %d", &d->arch) == 1 || sscanf(line, "mode %d", &d->mode) == 1 ||
           sscanf(line, "util %d", &d->util) == 1 || sscanf(line, "ecc %d", &d->ecc) == 1 ||
           sscanf(line, "sm %d %d", &d->sm, &d->occupancy) == 2 ||
           sscanf(line, "remap %d %d", &d->pending, &d->failed) == 2 ||
           sscanf(line, "pages %d", &d->pages) == 1 || sscanf(line, "recovery %d", &d->recovery) == 1;
}

static device *by_uuid(const char *uuid)
{
    for (int i = 0; i < devices; i++)
        if (!strcmp(table[i].uuid, uuid))
            return &table[i];
    return NULL;
}

/* What one process of fake_cuda.c holds; its file is locked while it lives. */
static void read_cuda_process(const char *path, unsigned pid)
{
    char uuid[80], kind[16];
    u64 held;
    int sm, fd = open(path, O_RDONLY | O_CLOEXEC);
    FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (!file)
        return;
    int lives = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
    int known = fscanf(file, "%79s %15s %llu %d", uuid, kind, &held, &sm) == 4;
    fclose(file);
    device *d = lives && known ? by_uuid(uuid) : NULL;
    if (!d)
        return;
    d->free -= held;
    if (sm >= 0 && sm > d->sm)
        d->sm = sm, d->occupancy = sm / 2, d->util = 100;
    /* As of the real driver, only processes of the caller's own PID namespace are listed. */
    int list = !strcmp(kind, "mps") ? MPS : COMPUTE;
    process p = {pid, held, NOBODY, NOBODY};
    if (!kill((pid_t)pid, 0) || errno == EPERM)
        d->processes[list][d->count[list]++] = p;
}

static void read_cuda(const char *folder)
{
    char path[512], uuid[80];
    u64 xid;
    struct dirent *entry;
    DIR *dir = opendir(folder);
    while (dir && (entry = readdir(dir))) {
        unsigned pid = (unsigned)strtoul(entry->d_name, NULL, 10);
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (pid)
            read_cuda_process(path, pid);
    }
    if (dir)
        closedir(dir);
    snprintf(path, sizeof path, "%s/xids", folder);
    FILE *file = fopen(path, "r");
    while (file && fscanf(file, "%79s %llu", uuid, &xid) == 2)
        if (by_uuid(uuid))
            by_uuid(uuid)->xids[by_uuid(uuid)->raised++] = xid;
    if (file)
        fclose(file);
}

static void load(void)
{
    static struct stat last;
    const char *path = getenv("FAKE_NVML_TABLE"), *cuda_folder = getenv("FAKE_CUDA_FOLDER");
    struct stat now;
    if (!path || stat(path, &now))
        memset(&now, 0, sizeof now);
    /* Parsed only when it is another: what an agent costs is measured on this. */
    if (!cuda_folder && now.st_ino && now.st_ino == last.st_ino && now.st_size == last.st_size &&
        !memcmp(&now.st_mtim, &last.st_mtim, sizeof now.st_mtim) &&
        !memcmp(&now.st_ctim, &last.st_ctim, sizeof now.st_ctim))
        return;
    last = now;
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    int gpu = ABSENT;
    devices = 0, answered = 0, cuda = 13000, entry_bytes = sizeof(process), field_code = 0;
    strcpy(driver, "580.95.05");
    strcpy(library, "");
    while (file && fgets(line, sizeof line, file)) {
        if (line[0] == '#' || line[0] == '\n' || (devices && read_process(line, &table[devices - 1])) ||
            read_driver(line) || read_device(line, &gpu) ||
            (devices && read_detail(line, &table[devices - 1])))
            continue;
        fprintf(stderr, "fake_nvml: %s: cannot read: %s", path, line);
        abort();
    }
    if (file)
        fclose(file);
    if (cuda_folder)
        read_cuda(cuda_folder);
}

/* --- what comes before every call */

/* The code for this function in a list; OK where it is not there. */
static int listed(const answer *list, unsigned count, const char *function)
{
    for (unsigned i = 0; i < count; i++)
        if (!strcmp(list[i].function, function) || !strcmp(list[i].function, "all"))
            return list[i].code;
    return OK;
}

/* What the table says a call answers before it does anything. */
static ret before(const char *function, device *d)
{
    load();
    ret r = listed(answers, answered, function);
    if (r)
        return r;
    if (!strcmp(driver, "none"))
        return NOT_LOADED;
    if (!initialised)
        return UNINIT;
    if (strcmp(driver, since))
        return MISMATCH;
    if (!d)
        return OK;
    if (d < table || d >= table + devices)
        return INVALID;
    return listed(d->answers, d->answered, function);
}

static int lock(void) { pthread_mutex_lock(&mutex); return ++depth; }
static void unlock(int *held) { (void)held; depth--; pthread_mutex_unlock(&mutex); }

/* The same, once the call may return; without the mutex while it may not. */
static ret enter(const char *function, device *d)
{
    ret r;
    while ((r = before(function, d)) == STUCK) {
        int held = depth;
        for (int i = 0; i < held; i++)
            unlock(NULL);
        usleep(20000);
        for (int i = 0; i < held; i++)
            lock();
    }
    return r;
}
/* To the end of the block that it stands in, no other thread reads the table again. */
#define ENTER_(d, line) \
    __attribute__((cleanup(unlock))) int held_##line = lock(); \
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

/* The n-th device below parent (ABSENT: the n-th GPU), or NULL. */
static device *nth(int parent, unsigned n)
{
    for (int i = 0; i < devices; i++)
        if (table[i].parent == parent && n-- == 0)
            return &table[i];
    return NULL;
}

/* --- the driver */

ret nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    __attribute__((cleanup(unlock))) int held = lock();
    (void)held;
    ret r = enter(__func__, NULL);
    if (r && r != UNINIT)
        return r;
    if (*library && strcmp(library, driver))
        return MISMATCH;
    if (!initialised++) {
        strcpy(since, driver);
        for (counted = 0; nth(ABSENT, counted); counted++)
            ;
        if (getenv("FAKE_NVML_DEVICE"))
            opened = open(getenv("FAKE_NVML_DEVICE"), O_RDONLY | O_CLOEXEC);
        if (!ballast && getenv("FAKE_NVML_BALLAST_MIB")) {
            size_t size = strtoul(getenv("FAKE_NVML_BALLAST_MIB"), NULL, 10) << 20;
            ballast = memset(malloc(size), 1, size);
        }
    }
    for (int i = 0; !born && i < devices; i++)
        told[i] = table[i].raised;
    born = 1;
    return OK;
}
ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ret nvmlShutdown(void)
{
    ENTER(NULL);
    if (!--initialised && opened >= 0) {
        close(opened);
        opened = -1;
    }
    return OK;
}
const char *nvmlErrorString(ret code) { (void)code; return "an error that only this driver has"; }
ret nvmlSystemGetDriverVersion(char *to, unsigned size) { ENTER(NULL); return text(driver, to, size); }
ret nvmlSystemGetCudaDriverVersion_v2(int *to) { ENTER(NULL); *to = cuda; return OK; }
ret nvmlSystemGetCudaDriverVersion(int *to) { ENTER(NULL); *to = cuda; return OK; }

ret nvmlDeviceGetCount_v2(unsigned *to)
{
    ENTER(NULL);
    for (*to = 0; *to < counted && nth(ABSENT, *to); ++*to)
        ;
    return OK;
}

ret nvmlDeviceGetHandleByIndex_v2(unsigned index, device **to)
{
    ENTER(NULL);
    device *d = nth(ABSENT, index);
    if (!d || index >= counted)
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

/* --- what a device is */

ret nvmlDeviceGetName(device *d, char *to, unsigned size) { ENTER(d); return text(d->name, to, size); }
ret nvmlDeviceGetUUID(device *d, char *to, unsigned size) { ENTER(d); return text(d->uuid, to, size); }
ret nvmlDeviceGetArchitecture(device *d, unsigned *to) { ENTER(d); *to = (unsigned)d->arch; return OK; }
ret nvmlDeviceGetComputeMode(device *d, int *to) { ENTER(d); *to = d->mode; return OK; }
ret nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) { ENTER(d); *major = 9; *minor = 0; return OK; }

ret nvmlDeviceGetIndex(device *d, unsigned *to)
{
    ENTER(d);
    for (*to = 0; nth(d->parent, *to) != d; ++*to)
        ;
    return OK;
}
ret nvmlDeviceGetMinorNumber(device *d, unsigned *to) { return nvmlDeviceGetIndex(d, to); }

ret nvmlDeviceGetPciInfo_v3(device *d, pci *to)
{
    unsigned index = 0;
    ENTER(d);
    while (nth(d->parent, index) != d)
        index++;
    memset(to, 0, sizeof *to);
    to->bus = index + 1;
    snprintf(to->legacy, sizeof to->legacy, "0000:%02X:00.0", to->bus);
    snprintf(to->address, sizeof to->address, "00000000:%02X:00.0", to->bus);
    return OK;
}

ret nvmlDeviceGetTopologyCommonAncestor(device *d, device *other, int *to) { ENTER(d); (void)other; *to = 40; return OK; }

ret nvmlDeviceGetNvLinkState(device *d, unsigned link, int *to)
{
    ENTER(d);
    if (!d->linked)
        return UNSUPPORTED;
    return *to = link < d->linked, link < 18 ? OK : INVALID;
}

ret nvmlDeviceGetNvLinkRemotePciInfo_v2(device *d, unsigned link, pci *to)
{
    ENTER(d);
    if (link >= d->linked)
        return INVALID;
    memset(to, 0, sizeof *to);
    return strcpy(to->address, d->links[link]), OK;
}

/* --- MIG */

ret nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending)
{
    ENTER(d);
    if (d->parent >= 0 || d->arch < AMPERE || strstr(d->name, "GeForce"))
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

/* MIG profiles, as the device plugin asks for them. The name of a MIG device ends in its own, as in
 * "1c.3g.40gb". A GPU instance is stood for by any of the MIG devices in it. */

typedef struct { device *device; unsigned id, profile, start, size; } gpu_instance;
typedef struct { device *device, *instance; unsigned id, profile, start, size; } compute_instance;

enum { PROFILES = 5 };
static const unsigned SLICES[PROFILES] = { 1, 2, 3, 4, 7 }; /* by the number of their profile */
static const unsigned EIGHTHS[PROFILES] = { 1, 2, 4, 4, 8 }; /* of the memory, as of an H100 */

static unsigned profile_of(unsigned slices)
{
    unsigned profile = 0;
    while (profile < PROFILES - 1 && SLICES[profile] < slices)
        profile++;
    return profile;
}

static void slices_of(const device *d, unsigned *compute, unsigned *gpu)
{
    const char *word = strrchr(d->name, ' ');
    *compute = *gpu = 0;
    if (sscanf(word ? word + 1 : d->name, "%uc.%ug.", compute, gpu) == 2)
        return;
    sscanf(word ? word + 1 : d->name, "%ug.", gpu);
    *compute = *gpu;
}

ret nvmlDeviceIsMigDeviceHandle(device *d, unsigned *to) { ENTER(d); *to = d->parent >= 0; return OK; }

ret nvmlDeviceGetAttributes_v2(device *d, attributes *to)
{
    ENTER(d);
    if (d->parent < 0)
        return UNSUPPORTED;
    memset(to, 0, sizeof *to);
    slices_of(d, &to->compute_slices, &to->gpu_slices);
    to->mib = d->total >> 20;
    return OK;
}

ret nvmlDeviceGetGpuInstanceById(device *d, unsigned id, device **to)
{
    ENTER(d);
    for (int i = 0; i < devices; i++)
        if (table[i].parent == (int)(d - table) && table[i].gi == id)
            return *to = &table[i], OK;
    return NOT_FOUND;
}

ret nvmlGpuInstanceGetInfo(device *d, gpu_instance *to)
{
    unsigned compute, gpu;
    ENTER(d);
    slices_of(d, &compute, &gpu);
    *to = (gpu_instance){ &table[d->parent], d->gi, profile_of(gpu), 0, gpu };
    return OK;
}

ret nvmlGpuInstanceGetComputeInstanceById(device *d, unsigned id, device **to)
{
    ENTER(d);
    for (int i = 0; i < devices; i++)
        if (table[i].parent == d->parent && table[i].gi == d->gi && table[i].ci == id)
            return *to = &table[i], OK;
    return NOT_FOUND;
}

ret nvmlComputeInstanceGetInfo_v2(device *d, compute_instance *to)
{
    unsigned compute, gpu;
    ENTER(d);
    slices_of(d, &compute, &gpu);
    *to = (compute_instance){ &table[d->parent], d, d->ci, profile_of(compute), 0, compute };
    return OK;
}

ret nvmlDeviceGetGpuInstanceProfileInfo(device *d, unsigned profile, gpu_profile *to)
{
    ENTER(d);
    if (profile >= PROFILES)
        return UNSUPPORTED;
    memset(to, 0, sizeof *to);
    to->id = profile;
    to->slices = SLICES[profile];
    to->mib = (d->total >> 20) * EIGHTHS[profile] / 8;
    return OK;
}

ret nvmlGpuInstanceGetComputeInstanceProfileInfo(device *d, unsigned profile, unsigned engine, compute_profile *to)
{
    ENTER(d);
    if (profile >= PROFILES || engine)
        return UNSUPPORTED;
    memset(to, 0, sizeof *to);
    to->id = profile;
    to->slices = SLICES[profile];
    return OK;
}

/* --- memory and who uses it */

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

static ret list(device *d, int kind, unsigned *count, void *out, unsigned size)
{
    unsigned room = *count;
    *count = d->count[kind];
    if (room < d->count[kind])
        return TOO_SMALL;
    for (unsigned i = 0; i < d->count[kind]; i++) {
        struct { process process; u64 protected_bytes; } entry = {d->processes[kind][i], 0};
        memcpy((char *)out + i * size, &entry, size);
    }
    return OK;
}

/* Some drivers write more or less for _v3 than nvml.h says (tests/branches.py). */
#define LISTS(name, kind) \
    ret nvmlDeviceGet##name##RunningProcesses_v3(device *d, unsigned *n, process *to) \
    { ENTER(d); return list(d, kind, n, to, entry_bytes); } \
    ret nvmlDeviceGet##name##RunningProcesses_v2(device *d, unsigned *n, process *to) \
    { ENTER(d); return list(d, kind, n, to, sizeof *to); } \
    ret nvmlDeviceGet##name##RunningProcesses(device *d, unsigned *n, void *to) \
    { ENTER(d); return list(d, kind, n, to, 16); }
LISTS(Compute, COMPUTE)
LISTS(Graphics, GRAPHICS)
LISTS(MPSCompute, MPS)

ret nvmlDeviceGetMemoryLimits_v1(device *d, limits *to)
{
    ENTER(d);
    if (d->parent >= 0)
        return INVALID;
    for (unsigned i = 0; i < d->limited; i++)
        if (!strcmp(d->limits[i].space, to->space)) {
            to->soft = d->limits[i].soft, to->hard = d->limits[i].hard, to->used = d->limits[i].used;
            return OK;
        }
    return NOT_FOUND;
}

/* --- how busy it is */

ret nvmlDeviceGetUtilizationRates(device *d, rates *to)
{
    ENTER(d);
    if (d->util == ABSENT || d->parent >= 0 || nth((int)(d - table), 0))
        return UNSUPPORTED;
    to->gpu = (unsigned)d->util, to->memory = 0;
    return OK;
}

ret nvmlDeviceGetProcessUtilization(device *d, busy *to, unsigned *count, u64 after)
{
    unsigned room = *count, found = 0;
    ENTER(d);
    /* The real driver wants room for all samples that it may have (tests/recorded/gpu). */
    if (room < MOST_SAMPLES)
        return *count = MOST_SAMPLES, TOO_SMALL;
    for (unsigned i = 0; i < d->busies; i++)
        if (d->busy[i].at > after && found++ < room && to)
            to[found - 1] = d->busy[i];
    *count = found;
    return !found ? NOT_FOUND : found > room ? TOO_SMALL : OK;
}

ret nvmlGpmQueryDeviceSupport(device *d, support *to)
{
    ENTER(d);
    to->supported = d->arch >= HOPPER && !strstr(d->name, "GeForce");
    return OK;
}

ret nvmlGpmSampleAlloc(struct sample **to)
{
    ENTER(NULL);
    *to = calloc(1, sizeof **to);
    (*to)->magic = MAGIC;
    samples++;
    return OK;
}

ret nvmlGpmSampleFree(struct sample *s)
{
    ENTER(NULL);
    if (!s || s->magic != MAGIC)
        return INVALID;
    s->magic = 0, samples--;
    free(s);
    return OK;
}

static ret take(device *d, struct sample *to)
{
    if (to->magic != MAGIC)
        return INVALID;
    if (d->sm == ABSENT)
        return UNSUPPORTED;
    to->sm = d->sm, to->occupancy = d->occupancy;
    clock_gettime(CLOCK_MONOTONIC, &to->at);
    return OK;
}

ret nvmlGpmSampleGet(device *d, struct sample *to) { ENTER(d); return take(d, to); }

ret nvmlGpmMigSampleGet(device *d, unsigned instance, struct sample *to)
{
    ENTER(d);
    for (int i = 0; i < devices; i++)
        if (table[i].parent == d - table && table[i].gi == instance)
            return take(&table[i], to);
    return NOT_FOUND;
}

ret nvmlGpmMetricsGet(comparison *c)
{
    ENTER(NULL);
    struct sample *a = c->first, *b = c->second;
    if (c->version != 1)
        return VERSION;
    if (a->magic != MAGIC || b->magic != MAGIC)
        return INVALID;
    double apart = (double)(b->at.tv_sec - a->at.tv_sec) + 1e-9 * (double)(b->at.tv_nsec - a->at.tv_nsec);
    for (unsigned i = 0; i < c->count; i++) {
        metric *m = &c->metrics[i];
        m->code = apart < 0.1 ? NO_DATA : m->id == 2 || m->id == 3 ? OK : UNSUPPORTED;
        m->value = m->id == 2 ? b->sm : b->occupancy;
    }
    return OK;
}

/* For tests that look for leaks; NVML has no such call. */
int fakeSamples(void) { return samples; }

/* --- how well it is */

ret nvmlDeviceGetTotalEccErrors(device *d, int kind, int counter, u64 *to)
{
    ENTER(d);
    if (strstr(d->name, "GeForce"))
        return UNSUPPORTED;
    *to = kind == 1 && counter == 0 ? (u64)d->ecc : 0;
    return OK;
}

ret nvmlDeviceGetRemappedRows(device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    ENTER(d);
    if (d->arch < AMPERE || strstr(d->name, "GeForce"))
        return UNSUPPORTED;
    *corrected = 0, *uncorrected = 0, *pending = (unsigned)d->pending, *failed = (unsigned)d->failed;
    return OK;
}

ret nvmlDeviceGetRetiredPagesPendingStatus(device *d, int *to)
{
    ENTER(d);
    *to = d->pages;
    return d->arch > TURING ? UNSUPPORTED : OK;
}

ret nvmlDeviceGetFieldValues(device *d, int count, field *to)
{
    ENTER(d);
    for (int i = 0; i < count; i++) {
        to[i].code = to[i].id != 230 || d->recovery == ABSENT ? UNSUPPORTED : field_code;
        to[i].type = 1, to[i].value.ull = 0, to[i].value.ui = (unsigned)d->recovery;
    }
    return OK;
}

/* --- events */

ret nvmlEventSetCreate(void **to) { ENTER(NULL); *to = &mutex; return OK; }
ret nvmlEventSetFree(void *set) { (void)set; return OK; }
ret nvmlDeviceGetSupportedEventTypes(device *d, u64 *to) { ENTER(d); *to = XID_EVENTS; return OK; }
ret nvmlDeviceRegisterEvents(device *d, u64 kinds, void *set) { ENTER(d); (void)kinds; (void)set; return OK; }

static ret next_event(const char *function, event *to)
{
    __attribute__((cleanup(unlock))) int held = lock();
    (void)held;
    ret r = enter(function, NULL);
    if (r)
        return r;
    for (int i = 0; i < devices; i++)
        if (told[i] < table[i].raised) {
            event e = {&table[i], XID_EVENTS, table[i].xids[told[i]++], NOBODY, NOBODY};
            *to = e;
            return OK;
        }
    return TIMEOUT;
}

ret nvmlEventSetWait_v2(void *set, event *to, unsigned timeout_ms)
{
    ret r;
    (void)set;
    for (unsigned waited = 0; (r = next_event(__func__, to)) == TIMEOUT && waited < timeout_ms; waited += 50)
        usleep(50000);
    return r;
}
