/* A driver library that shows busy cards where there are none, for comparing monitors: a training node
   whose load, heat, power and memory move each second. FAKE_NVML_CARDS: how many (1 to 16, else 8).
   FAKE_NVML_PID: the process that is said to use them. It has the calls that memconsole and nvitop make. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ULL << 20)
enum { OK = 0, WRONG_ARGUMENT = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7 };

static unsigned number(const char *name, unsigned otherwise) {
    const char *text = getenv(name);
    return text && atoi(text) > 0 ? (unsigned)atoi(text) : otherwise;
}
static unsigned cards(void) {
    unsigned count = number("FAKE_NVML_CARDS", 8);
    return count > 16 ? 8 : count;
}
static unsigned card(void *handle) { return (unsigned)(size_t)handle - 1; }

/* A number from low to high that differs by second and by card, the same whoever asks. */
static unsigned moving(void *handle, unsigned low, unsigned high) {
    unsigned mixed = (unsigned)time(NULL) * 2654435761u ^ (card(handle) + 1) * 40503u * 65537u;
    mixed ^= mixed >> 15; mixed *= 2246822519u; mixed ^= mixed >> 13;
    return low + mixed % (high - low + 1);
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.95.05"); return OK;
}
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = cards(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= cards()) return WRONG_ARGUMENT;
    *handle = (void *)(size_t)(index + 1); return OK;
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = card(handle); return OK; }
int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
    snprintf(text, length, "NVIDIA H100 80GB HBM3"); return OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012u", card(handle)); return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x18 + 0x10 * card(handle);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return OK;
}

static unsigned long long used(void *handle) { return (61000ULL + moving(handle, 0, 900)) * MIB; }
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    memory->total = 81559 * MIB; memory->used = used(handle);
    memory->free = memory->total - memory->used; return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    memory->total = 81559 * MIB; memory->reserved = 551 * MIB; memory->used = used(handle);
    memory->free = memory->total - memory->reserved - memory->used; return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    rates[0] = moving(handle, 84, 100); rates[1] = moving(handle, 40, 66); return OK;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    *celsius = moving(handle, 58, 66); return OK;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    *milliwatts = 1000 * moving(handle, 560, 695); return OK;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
    *milliwatts = 700000; return OK;
}
int nvmlDeviceGetPerformanceState(void *handle, int *state) { *state = 0; return OK; }
int nvmlDeviceGetDisplayActive(void *handle, int *on) { *on = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) {
    *count = 0; return OK;
}
int nvmlDeviceGetFanSpeed(void *handle, unsigned *percent) { return NOT_SUPPORTED; }
int nvmlDeviceGetDriverModel(void *handle, int *now, int *then) { return NOT_SUPPORTED; }
int nvmlDeviceGetEncoderUtilization(void *handle, unsigned *percent, unsigned *microseconds) {
    *percent = 0; *microseconds = 167000; return OK;
}
int nvmlDeviceGetDecoderUtilization(void *handle, unsigned *percent, unsigned *microseconds) {
    *percent = 0; *microseconds = 167000; return OK;
}
int nvmlDeviceGetPersistenceMode(void *handle, int *on) { *on = 1; return OK; }
int nvmlDeviceGetComputeMode(void *handle, int *mode) { *mode = 0; return OK; }

struct process { unsigned pid; unsigned long long used; unsigned instance[2]; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    unsigned room = list ? *count : 0;
    *count = 1;
    if (!room) return TOO_SMALL;
    list->pid = number("FAKE_NVML_PID", (unsigned)getpid());
    list->used = used(handle) - 500 * MIB;
    list->instance[0] = list->instance[1] = ~0u; return OK;
}
struct share { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(void *handle, struct share *list, unsigned *count,
                                    unsigned long long since) {
    unsigned room = list ? *count : 0;
    *count = 1;
    if (!room) return TOO_SMALL;
    memset(list, 0, sizeof *list);
    list->pid = number("FAKE_NVML_PID", (unsigned)getpid());
    list->time = 1000000ULL * (unsigned long long)time(NULL);
    list->sm = moving(handle, 84, 100); list->memory = moving(handle, 40, 66); return OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    *count = 0; return OK;
}
