/* A library of NVIDIA's driver that answers as a text file says, for the real bindings (pynvml) above it.
 *
 * NVML_STATE names the file, and every call reads it again, so that a test changes it under a running program. A line is
 * a key and its values; `gpu UUID` begins a GPU, in the order of their indexes, and `instance UUID` a MIG device of the
 * GPU before it:
 *
 *     driver 0                     code that every call returns; the default is 0. Without a file it is 9, not loaded
 *     stuck                        every call hangs, also nvmlInit, until the line is gone
 *     gpu GPU-1
 *     name NVIDIA H100
 *     pci 00000000:17:00.0
 *     memory 80000 1000 3000       bytes: total, reserved, used
 *     temperature 61               degrees Celsius; also margin, slowdown, shutdown
 *     utilisation 87               percent
 *     power 350000                 milliwatts
 *     reasons 4                    bit mask
 *     ecc 0 2                      uncorrected memory errors: volatile, aggregate
 *     remapped 0 0 1 0             correctable, uncorrectable, pending, failure
 *     recovery 0                   field 230
 *     xids 31 48                   all so far, oldest first
 *     mig 1                        mode
 *     compute 4711 1000            pid and bytes of each process; also graphics
 *     lost                         it fell off the bus
 *     fails nvmlDeviceGetName 4    the code of one function, or of all with `*`
 *     hangs nvmlDeviceGetName      one function, or all with `*`, until the line is gone
 *
 * A GPU does not support what it has no line for. A function that an older driver lacks is left out of the build with
 * -DnvmlX=lacks_nvmlX.
 *
 * Where it is stricter than the documentation, since drivers differ:
 *   - A GPU that was lost, and a driver that was unloaded, stay so until every nvmlInit was ended by nvmlShutdown.
 *   - nvmlDeviceGetHandleByUUID fails if any GPU is lost.
 *   - A handle of an ended session is an invalid argument. The real library may crash.
 * Where it is weaker than a real driver:
 *   - A call that hangs delays no other. A real driver often holds a lock of the kernel.
 *   - Any process may read everything, and a reset is not refused while a process has the GPU open.
 *   - Of the events there are only Xid errors. Each GPU keeps 32 values of a line.
 *   - It allocates no memory of a GPU and knows no processes but those of the file.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999
};
enum { DEVICES = 32, FACTS = 24, VALUES = 32, XID_EVENT = 0x8, NO_INSTANCE = -1 };

/* The structures of nvml.h. */
typedef struct { unsigned long long total, free, used; } memory_v1_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned version; int margin; } margin_t;
typedef struct { unsigned version, sensor; int temperature; } temperature_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType, nvmlReturn;
    union { unsigned uiVal; unsigned long long ullVal; } value;
} field_t;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpuInstance, computeInstance; } process_t;

/* The file. */
typedef struct { char key[16], text[96]; int count; long long values[VALUES]; } fact_t;
typedef struct { char uuid[96]; int parent, facts; fact_t fact[FACTS]; } device_t;
typedef struct { int error, stuck, devices; device_t device[DEVICES]; } state_t;

/* What lives from the first nvmlInit to the last nvmlShutdown. */
typedef struct handle { unsigned session; char uuid[96]; int lost; struct handle *next; } handle_t;
typedef handle_t *nvmlDevice_t;
typedef struct set {
    int freed;
    unsigned session, devices;
    struct { nvmlDevice_t handle; int heard; } device[DEVICES];
} set_t;
typedef set_t *nvmlEventSet_t;
typedef struct { nvmlDevice_t device; unsigned long long type, data; unsigned gpuInstance, computeInstance; } event_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { unsigned number; int users, error, sets; char path[4096]; handle_t *handles; } session;

static void pause_ms(long ms) {
    struct timespec duration = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&duration, NULL);
}

static void read_line(state_t *state, char *line) {
    char *key = strtok(line, " \n"), *rest = strtok(NULL, "\n");
    if (key == NULL) return;
    if (strcmp(key, "driver") == 0) {
        state->error = rest ? atoi(rest) : 0;
        return;
    }
    if (strcmp(key, "stuck") == 0) {
        state->stuck = 1;
        return;
    }
    if (strcmp(key, "gpu") == 0 || strcmp(key, "instance") == 0) {
        int parent = NO_INSTANCE;
        if (key[0] == 'i')
            for (parent = state->devices - 1; parent >= 0 && state->device[parent].parent != NO_INSTANCE;) parent--;
        if (state->devices == DEVICES || rest == NULL) abort();
        device_t *added = &state->device[state->devices++];
        added->parent = parent;
        added->facts = 0;
        snprintf(added->uuid, sizeof added->uuid, "%s", rest);
        return;
    }
    if (state->devices == 0) abort();
    device_t *device = &state->device[state->devices - 1];
    if (device->facts == FACTS) abort();
    fact_t *fact = &device->fact[device->facts++];
    snprintf(fact->key, sizeof fact->key, "%s", key);
    snprintf(fact->text, sizeof fact->text, "%s", rest ? rest : "");
    fact->count = 0;
    for (char *end; rest && fact->count < VALUES; rest = end) {
        long long value = strtoll(rest, &end, 0);
        if (end == rest) break;
        fact->values[fact->count++] = value;
    }
}

/* Read the file; a test replaces it as a whole, so that it is never half there. */
static void load(state_t *state) {
    char line[1024];
    state->error = state->stuck = state->devices = 0;
    FILE *file = fopen(session.path, "re");
    if (file == NULL) {
        state->error = DRIVER_NOT_LOADED;
        return;
    }
    while (fgets(line, sizeof line, file)) read_line(state, line);
    fclose(file);
}

static const fact_t *fact_of(const device_t *device, const char *key) {
    for (int i = 0; i < device->facts; i++)
        if (strcmp(device->fact[i].key, key) == 0) return &device->fact[i];
    return NULL;
}

/* Return what a line `hangs` or `fails` says of a function: 1 or the code, 0 without such a line. */
static int said_of(const device_t *device, const char *key, const char *function) {
    for (int i = 0; i < device->facts; i++) {
        const fact_t *fact = &device->fact[i];
        char name[64];
        int code = 1;
        if (strcmp(fact->key, key) || sscanf(fact->text, "%63s %d", name, &code) < 1) continue;
        if (strcmp(name, "*") == 0 || strcmp(name, function) == 0) return code;
    }
    return 0;
}

static const device_t *find(const state_t *state, const char *uuid) {
    for (int i = 0; i < state->devices; i++)
        if (strcmp(state->device[i].uuid, uuid) == 0) return &state->device[i];
    return NULL;
}

/* Return the only handle of a device in this session. */
static nvmlDevice_t handle_of(const char *uuid) {
    handle_t *handle = session.handles;
    while (handle && strcmp(handle->uuid, uuid)) handle = handle->next;
    if (handle == NULL) {
        handle = calloc(1, sizeof *handle);
        handle->session = session.number;
        snprintf(handle->uuid, sizeof handle->uuid, "%s", uuid);
        handle->next = session.handles;
        session.handles = handle;
    }
    return handle;
}

/* Load the file with the lock held, as soon as the driver is not stuck. */
static void load_unstuck(state_t *state) {
    for (load(state); state->stuck; load(state)) {
        pthread_mutex_unlock(&lock);
        pause_ms(2);
        pthread_mutex_lock(&lock);
    }
}

/* Load the file for a call to the driver, and return the code of the driver as a whole. */
static int enter(state_t *state) {
    pthread_mutex_lock(&lock);
    if (session.users) load_unstuck(state);
    int code = session.users ? SUCCESS : UNINITIALIZED;
    if (code == SUCCESS) {
        if (session.error == SUCCESS) session.error = state->error;
        code = session.error;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* Return whether a device is lost, or was in this session; the instances of a GPU are lost with it. */
static int is_lost(const state_t *state, const char *uuid) {
    const device_t *device = find(state, uuid);
    handle_t *handle = handle_of(uuid);
    if (device == NULL || fact_of(device, "lost")) handle->lost = 1;
    if (device && device->parent != NO_INSTANCE && is_lost(state, state->device[device->parent].uuid)) handle->lost = 1;
    return handle->lost;
}

/* Do what the file says of a call on one device: hang, fail or return it. */
static int look_up(state_t *state, const char *function, const char *uuid, const device_t **found) {
    for (int code;; pause_ms(2)) {
        if ((code = enter(state)) != SUCCESS) return code;
        *found = find(state, uuid);
        if (*found == NULL || !said_of(*found, "hangs", function)) break;
    }
    pthread_mutex_lock(&lock);
    int lost = is_lost(state, uuid);
    pthread_mutex_unlock(&lock);
    return lost ? GPU_IS_LOST : said_of(*found, "fails", function);
}

static int query(state_t *state, const char *function, nvmlDevice_t handle, const device_t **found) {
    int code = enter(state);
    if (code != SUCCESS) return code;
    if (handle == NULL || handle->session != session.number) return INVALID_ARGUMENT;
    return look_up(state, function, handle->uuid, found);
}

/* Return a line of a device, and NOT_SUPPORTED without it. */
static int value_of(const char *function, nvmlDevice_t handle, const char *key, fact_t *fact) {
    state_t state;
    const device_t *device;
    int code = query(&state, function, handle, &device);
    if (code != SUCCESS) return code;
    const fact_t *found = fact_of(device, key), *mig = fact_of(device, "mig");
    if (found == NULL || (strcmp(key, "utilisation") == 0 && mig && mig->values[0])) return NOT_SUPPORTED;
    *fact = *found;
    return SUCCESS;
}

static int number_of(const char *function, nvmlDevice_t handle, const char *key, unsigned *value) {
    fact_t fact;
    if (value == NULL) return INVALID_ARGUMENT;
    int code = value_of(function, handle, key, &fact);
    if (code == SUCCESS) *value = (unsigned)fact.values[0];
    return code;
}

static int text_to(char *buffer, unsigned length, const char *text) {
    if (buffer == NULL) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

/* Sessions. */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    state_t state;
    const char *path = getenv("NVML_STATE");
    pthread_mutex_lock(&lock);
    if (session.users == 0) snprintf(session.path, sizeof session.path, "%s", path ? path : "");
    load_unstuck(&state);
    int code = state.error;
    if (code == SUCCESS && session.users++ == 0) {
        session.number++;
        session.error = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = session.users ? SUCCESS : UNINITIALIZED;
    if (code == SUCCESS && --session.users == 0) {
        session.number++;
        session.handles = NULL; /* Left in memory: somebody may still use one, and is to be told. */
        session.sets = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* For tests, and not of NVML: the unended nvmlInit, and the event sets in use. */
int fakeUsers(void) { return session.users; }
int fakeEventSets(void) { return session.sets; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    state_t state;
    int code = enter(&state);
    return code == SUCCESS ? text_to(version, length, "580.95.05") : code;
}

/* Devices. */

int nvmlDeviceGetCount_v2(unsigned *count) {
    state_t state;
    if (count == NULL) return INVALID_ARGUMENT;
    int code = enter(&state);
    if (code != SUCCESS) return code;
    *count = 0;
    for (int i = 0; i < state.devices; i++) *count += state.device[i].parent == NO_INSTANCE;
    return SUCCESS;
}

/* Return the handle of the device at a place of the list: of GPUs, or of the instances of one. */
static int at(const char *function, int parent, unsigned index, int absent, nvmlDevice_t *handle) {
    state_t state;
    const device_t *device;
    int code = enter(&state);
    if (code != SUCCESS) return code;
    int i = 0;
    for (unsigned seen = 0; i < state.devices; i++)
        if (state.device[i].parent == parent && seen++ == index) break;
    if (i == state.devices) return absent;
    char uuid[96];
    strcpy(uuid, state.device[i].uuid);
    if ((code = look_up(&state, function, uuid, &device)) != SUCCESS) return code;
    pthread_mutex_lock(&lock);
    *handle = handle_of(uuid);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
    return handle ? at("nvmlDeviceGetHandleByIndex_v2", NO_INSTANCE, index, INVALID_ARGUMENT, handle) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
    state_t state;
    if (uuid == NULL || handle == NULL) return INVALID_ARGUMENT;
    int code = enter(&state);
    if (code != SUCCESS) return code;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < state.devices; i++)
        if (is_lost(&state, state.device[i].uuid)) code = GPU_IS_LOST;
    if (code == SUCCESS && find(&state, uuid) == NULL) code = NOT_FOUND;
    if (code == SUCCESS) *handle = handle_of(uuid);
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *index) {
    state_t state;
    const device_t *device;
    int code = query(&state, "nvmlDeviceGetIndex", handle, &device);
    if (code != SUCCESS) return code;
    *index = 0;
    for (const device_t *one = state.device; one < device; one++) *index += one->parent == NO_INSTANCE;
    return SUCCESS;
}

int nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned length) {
    state_t state;
    const device_t *device;
    int code = query(&state, "nvmlDeviceGetUUID", handle, &device);
    return code == SUCCESS ? text_to(uuid, length, device->uuid) : code;
}

int nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned length) {
    fact_t fact;
    int code = value_of("nvmlDeviceGetName", handle, "name", &fact);
    return code == SUCCESS ? text_to(name, length, fact.text) : code;
}

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, pci_t *pci) {
    fact_t fact;
    if (pci == NULL) return INVALID_ARGUMENT;
    int code = value_of("nvmlDeviceGetPciInfo_v3", handle, "pci", &fact);
    if (code != SUCCESS) return code;
    memset(pci, 0, sizeof *pci);
    if (sscanf(fact.text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) return UNKNOWN;
    snprintf(pci->busId, sizeof pci->busId, "%.31s", fact.text);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return SUCCESS;
}

/* MIG. */

int nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending) {
    int code = number_of("nvmlDeviceGetMigMode", handle, "mig", current);
    if (code == SUCCESS && pending) *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *count) {
    int code = number_of("nvmlDeviceGetMaxMigDeviceCount", handle, "mig", count);
    if (code == SUCCESS) *count = 7;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *instance) {
    state_t state;
    const device_t *device;
    int code = query(&state, "nvmlDeviceGetMigDeviceHandleByIndex", handle, &device);
    if (code != SUCCESS) return code;
    if (fact_of(device, "mig") == NULL) return NOT_SUPPORTED;
    return at("nvmlDeviceGetMigDeviceHandleByIndex", (int)(device - state.device), index, NOT_FOUND, instance);
}

int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned *instance) {
    state_t state;
    const device_t *device;
    int code = query(&state, "nvmlDeviceIsMigDeviceHandle", handle, &device);
    if (code == SUCCESS) *instance = device->parent != NO_INSTANCE;
    return code;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *handle) {
    state_t state;
    const device_t *device;
    int code = query(&state, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance, &device);
    if (code != SUCCESS) return code;
    if (device->parent == NO_INSTANCE) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    *handle = handle_of(state.device[device->parent].uuid);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* Memory, load and heat. */

int nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, memory_v1_t *memory) {
    fact_t fact;
    if (memory == NULL) return INVALID_ARGUMENT;
    int code = value_of("nvmlDeviceGetMemoryInfo", handle, "memory", &fact);
    if (code != SUCCESS) return code;
    memory->total = fact.values[0];
    memory->used = fact.values[1] + fact.values[2];
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, memory_v2_t *memory) {
    fact_t fact;
    if (memory == NULL) return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int code = value_of("nvmlDeviceGetMemoryInfo_v2", handle, "memory", &fact);
    if (code != SUCCESS) return code;
    memory->total = fact.values[0];
    memory->reserved = fact.values[1];
    memory->used = fact.values[2];
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, utilisation_t *rates) {
    if (rates == NULL) return INVALID_ARGUMENT;
    rates->memory = 0;
    return number_of("nvmlDeviceGetUtilizationRates", handle, "utilisation", &rates->gpu);
}

int nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned *milliwatts) {
    return number_of("nvmlDeviceGetPowerUsage", handle, "power", milliwatts);
}

int nvmlDeviceGetTemperature(nvmlDevice_t handle, unsigned sensor, unsigned *celsius) {
    return sensor ? INVALID_ARGUMENT : number_of("nvmlDeviceGetTemperature", handle, "temperature", celsius);
}

int nvmlDeviceGetTemperatureV(nvmlDevice_t handle, temperature_t *temperature) {
    if (temperature == NULL) return INVALID_ARGUMENT;
    if (temperature->version != (sizeof *temperature | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensor) return INVALID_ARGUMENT;
    return number_of("nvmlDeviceGetTemperatureV", handle, "temperature", (unsigned *)&temperature->temperature);
}

int nvmlDeviceGetMarginTemperature(nvmlDevice_t handle, margin_t *margin) {
    if (margin == NULL) return INVALID_ARGUMENT;
    if (margin->version != (sizeof *margin | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return number_of("nvmlDeviceGetMarginTemperature", handle, "margin", (unsigned *)&margin->margin);
}

int nvmlDeviceGetTemperatureThreshold(nvmlDevice_t handle, unsigned which, unsigned *celsius) {
    if (which > 1) return NOT_SUPPORTED;
    return number_of("nvmlDeviceGetTemperatureThreshold", handle, which ? "slowdown" : "shutdown", celsius);
}

static int reasons(const char *function, nvmlDevice_t handle, unsigned long long *bits) {
    fact_t fact;
    if (bits == NULL) return INVALID_ARGUMENT;
    int code = value_of(function, handle, "reasons", &fact);
    if (code == SUCCESS) *bits = fact.values[0];
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t handle, unsigned long long *bits) {
    return reasons("nvmlDeviceGetCurrentClocksEventReasons", handle, bits);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t handle, unsigned long long *bits) {
    return reasons("nvmlDeviceGetCurrentClocksThrottleReasons", handle, bits);
}

/* Faults. */

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, unsigned kind, unsigned counter, unsigned long long *count) {
    fact_t fact;
    if (count == NULL || kind > 1 || counter > 1) return INVALID_ARGUMENT;
    int code = value_of("nvmlDeviceGetTotalEccErrors", handle, "ecc", &fact);
    if (code == SUCCESS) *count = kind ? fact.values[counter] : 0;
    return code;
}

int nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failure) {
    fact_t fact;
    int code = value_of("nvmlDeviceGetRemappedRows", handle, "remapped", &fact);
    if (code != SUCCESS) return code;
    *correctable = (unsigned)fact.values[0];
    *uncorrectable = (unsigned)fact.values[1];
    *pending = (unsigned)fact.values[2];
    *failure = (unsigned)fact.values[3];
    return SUCCESS;
}

/* Fields with their line, and the place in it. */
static const struct { unsigned id; const char *key; int place; } fields[] = {
    {4, "ecc", 0},       {6, "ecc", 1},       {142, "remapped", 0}, {143, "remapped", 1},
    {144, "remapped", 2}, {145, "remapped", 3}, {230, "recovery", 0},
};

int nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, field_t *values) {
    state_t state;
    const device_t *device;
    if (values == NULL || count < 1) return INVALID_ARGUMENT;
    int code = query(&state, "nvmlDeviceGetFieldValues", handle, &device);
    for (int i = 0; code == SUCCESS && i < count; i++) {
        values[i].nvmlReturn = INVALID_ARGUMENT;
        for (size_t known = 0; known < sizeof fields / sizeof *fields; known++) {
            if (fields[known].id != values[i].fieldId) continue;
            const fact_t *fact = fact_of(device, fields[known].key);
            values[i].nvmlReturn = fact ? SUCCESS : NOT_SUPPORTED;
            values[i].valueType = 1;
            values[i].value.ullVal = fact ? (unsigned long long)fact->values[fields[known].place] : 0;
        }
    }
    return code;
}

/* Processes. */

static int processes(const char *function, nvmlDevice_t handle, const char *key, unsigned *count, process_t *found) {
    state_t state;
    const device_t *device;
    if (count == NULL) return INVALID_ARGUMENT;
    int code = query(&state, function, handle, &device);
    if (code != SUCCESS) return code;
    unsigned room = *count, total = 0;
    for (int i = 0; i < device->facts; i++) {
        const fact_t *fact = &device->fact[i];
        if (strcmp(fact->key, key)) continue;
        if (found && total < room)
            found[total] = (process_t){(unsigned)fact->values[0], fact->values[1], NO_INSTANCE, NO_INSTANCE};
        total++;
    }
    *count = total;
    return total > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, process_t *found) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v3", handle, "compute", count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, process_t *found) {
    return processes("nvmlDeviceGetGraphicsRunningProcesses_v3", handle, "graphics", count, found);
}

/* Events. */

int nvmlEventSetCreate(nvmlEventSet_t *set) {
    state_t state;
    if (set == NULL) return INVALID_ARGUMENT;
    int code = enter(&state);
    if (code != SUCCESS) return code;
    *set = calloc(1, sizeof **set);
    (*set)->session = session.number;
    session.sets++;
    return SUCCESS;
}

int nvmlEventSetFree(nvmlEventSet_t set) {
    if (set == NULL || set->freed || set->session != session.number) return INVALID_ARGUMENT;
    set->freed = 1; /* Left in memory, as the handles are. */
    session.sets--;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t handle, unsigned long long *kinds) {
    fact_t fact;
    int code = value_of("nvmlDeviceGetSupportedEventTypes", handle, "xids", &fact);
    *kinds = code == SUCCESS ? XID_EVENT : 0;
    return code == NOT_SUPPORTED ? SUCCESS : code;
}

/* Events from before the registration are not reported. */
int nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long kinds, nvmlEventSet_t set) {
    fact_t fact;
    if (set == NULL || set->freed || set->session != session.number) return INVALID_ARGUMENT;
    int code = value_of("nvmlDeviceRegisterEvents", handle, "xids", &fact);
    if (code != SUCCESS) return code;
    if (kinds & ~(unsigned long long)XID_EVENT || set->devices == DEVICES) return NOT_SUPPORTED;
    set->device[set->devices].handle = handle;
    set->device[set->devices++].heard = fact.count;
    return SUCCESS;
}

int nvmlEventSetWait_v2(nvmlEventSet_t set, event_t *event, unsigned timeout_ms) {
    if (set == NULL || event == NULL || set->freed || set->session != session.number) return INVALID_ARGUMENT;
    for (unsigned waited = 0;; waited++) {
        for (unsigned i = 0; i < set->devices; i++) {
            fact_t fact;
            nvmlDevice_t handle = set->device[i].handle;
            int code = value_of("nvmlEventSetWait_v2", handle, "xids", &fact);
            if (code != SUCCESS && code != NOT_SUPPORTED) return code;
            if (code == NOT_SUPPORTED) fact.count = 0;
            if (set->device[i].heard > fact.count) set->device[i].heard = fact.count;
            if (set->device[i].heard == fact.count) continue;
            unsigned long long xid = fact.values[set->device[i].heard++];
            *event = (event_t){handle, XID_EVENT, xid, NO_INSTANCE, NO_INSTANCE};
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        pause_ms(1);
    }
}
