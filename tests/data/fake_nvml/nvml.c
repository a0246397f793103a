/* A driver library whose answers are set by the environment, for fault tests.
   FAKE_NVML_AT: init or device, where it fails. FAKE_NVML: ok, slow, hang, segfault, or an NVML error code. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fail(const char *where) {
    const char *at = getenv("FAKE_NVML_AT"), *what = getenv("FAKE_NVML");
    if (!what || strcmp(what, "ok") == 0 || !at || strcmp(at, where) != 0) return 0;
    if (strcmp(what, "slow") == 0) { usleep(2500000); return 0; }
    if (strcmp(what, "hang") == 0) for (;;) sleep(1000);
    if (strcmp(what, "segfault") == 0) *(volatile int *)0 = 1;
    return atoi(what);
}
int nvmlInitWithFlags(unsigned flags) { return fail("init"); }
int nvmlInit_v2(void) { return fail("init"); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)1; return strcmp(uuid, "GPU-12") == 0 ? 0 : 6;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    strncpy(name, "NVIDIA GeForce RTX 3060", length); return 0;
}
int nvmlDeviceGetUUID(void *handle, char *name, unsigned length) { strncpy(name, "GPU-12", length); return 0; }
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    int code = fail("device"); if (code) return code;
    memory->total = 12288ULL << 20; memory->reserved = 256ULL << 20;
    memory->used = 2048ULL << 20; memory->free = 9984ULL << 20; return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) { rates[0] = 37; rates[1] = 9; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) { *celsius = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return 3; }
struct process { unsigned pid; unsigned long long used; unsigned instance[2]; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    if (!list) { *count = 1; return 7; }
    *count = 1; list->pid = (unsigned)getpid(); list->used = 1024ULL << 20; return 0;
}
