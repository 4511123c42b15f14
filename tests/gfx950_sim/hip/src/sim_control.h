/* What a test driver can ask of the simulated HIP library, beside HIP itself. Plain C.
 *
 * Environment, read once at the first call:
 *   GFX950_SIM_HIP_DEVICES  number of devices, 1 to 64 (default 8)
 *   GFX950_SIM_HIP_ARCH     arch names, comma separated; device i has name i, the last one repeats
 * (default gfx950) GFX950_SIM_HIP_LAUNCH   "simulate" (default) or "check": check and record
 * launches, run nothing GFX950_SIM_HIP_FAIL     call:code[:occurrence[:times]], comma separated;
 * see simhip_fail
 */
#ifndef GFX950_SIM_HIP_SIM_CONTROL_H_
#define GFX950_SIM_HIP_SIM_CONTROL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One HIP call as it returned. `name` lives as long as the library. */
typedef struct SimhipCall {
  const char* name;
  uint64_t thread; /* the kernel's thread id */
  void* stream;    /* the stream argument; NULL for the null stream and for calls without one */
  int32_t device;  /* the calling thread's current device, or the stream's device */
  int32_t code;    /* what the call returned */
} SimhipCall;

/* One checked launch, as handed to the launcher. The pointers are valid during the launch only. */
typedef struct SimhipLaunch {
  uint64_t id;        /* counts up from 1 over the process */
  const char* symbol; /* kernel name without ".kd" */
  const void* code;   /* the code object's bytes, the library's own copy */
  size_t code_size;
  const void* arguments; /* kernel argument segment */
  size_t arguments_size;
  void* stream;
  int32_t device;
  uint32_t grid[3];  /* workgroups */
  uint32_t block[3]; /* work items */
  uint32_t dynamic_lds_bytes;
} SimhipLaunch;

/* Runs a launch; returns a HIP error code and may write a NUL-terminated text of at most `size`
 * bytes. Called without any lock held, on the launching thread, perhaps on several at once. */
typedef int (*SimhipLauncher)(const SimhipLaunch* launch, char* text, size_t size, void* user);

/* Every launch from now on goes to `launcher`; NULL restores the default (the simulator where a
 * Python interpreter lives in the process, else none: launches are checked and recorded). */
void simhip_set_launcher(SimhipLauncher launcher, void* user);

/* Makes `call` fail with `code`, from its `occurrence`-th call from now on (1 is the next), `times`
 * times (0: for ever). The failed call does nothing else. Returns 0, or 1 if there is no such call.
 */
int simhip_fail(const char* call, int code, uint64_t occurrence, uint64_t times);
void simhip_clear_failures(void);

/* Calls recorded since the process started or simhip_clear_calls, oldest first; error-string and
 * control calls are not recorded. Beyond 1,000,000 the oldest are dropped. simhip_get_call returns
 * 0, or 1 past the end. */
uint64_t simhip_call_count(void);
int simhip_get_call(uint64_t index, SimhipCall* call);
void simhip_clear_calls(void);

/* Launches that passed every check since the process started. */
uint64_t simhip_launch_count(void);

/* Text of the calling thread's most recent failed call, "" if there is none: more than the code
 * says. */
const char* simhip_last_error_text(void);

/* Objects alive, for leak checks. `kind`: "module", "stream", "memory", "graph" or "graph_exec"; -1
 * otherwise. */
int64_t simhip_live(const char* kind);

/* Declares [pointer, pointer + bytes) as one allocation a kernel may use, as hipMalloc does for its
 * own. */
int simhip_register_memory(void* pointer, size_t bytes);
int simhip_unregister_memory(void* pointer);
/* The registered or hipMalloc'ed allocation around `pointer`; returns 1 if there is none. */
int simhip_find_memory(const void* pointer, void** base, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif
