// The test's side of the library: sim_control.h.
#include <string_view>

#include "journal.h"
#include "runtime.h"
#include "sim_control.h"

namespace {

using simhip::Journal;
using simhip::Runtime;
using Lock = std::lock_guard<std::mutex>;

}  // namespace

HIP_EXPORT void simhip_set_launcher(SimhipLauncher launcher, void* user) {
  simhip::SetLauncher(launcher, user);
}

HIP_EXPORT int simhip_fail(const char* call, int code, uint64_t occurrence, uint64_t times) {
  return Journal::Get().Inject(call, code, occurrence, times) ? 0 : 1;
}

HIP_EXPORT void simhip_clear_failures() { Journal::Get().ClearInjected(); }

HIP_EXPORT uint64_t simhip_call_count() { return Journal::Get().Count(); }

HIP_EXPORT int simhip_get_call(uint64_t index, SimhipCall* call) {
  return Journal::Get().At(index, call) ? 0 : 1;
}

HIP_EXPORT void simhip_clear_calls() { Journal::Get().Clear(); }

HIP_EXPORT uint64_t simhip_launch_count() { return simhip::LaunchCount(); }

HIP_EXPORT const char* simhip_last_error_text() { return simhip::LastErrorText().c_str(); }

HIP_EXPORT int64_t simhip_live(const char* kind) {
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mutex);
  const std::string_view name(kind);
  if (name == "module") return static_cast<int64_t>(runtime.modules.size());
  if (name == "stream") return static_cast<int64_t>(runtime.streams.size());
  if (name == "memory") return static_cast<int64_t>(runtime.allocations.size());
  if (name == "graph") return static_cast<int64_t>(runtime.graphs.size());
  if (name == "graph_exec") return static_cast<int64_t>(runtime.graph_execs.size());
  return -1;
}

HIP_EXPORT int simhip_register_memory(void* pointer, size_t bytes) {
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mutex);
  const auto key = reinterpret_cast<uintptr_t>(pointer);
  return runtime.allocations.emplace(key, simhip::Allocation{bytes, -1, false}).second ? 0 : 1;
}

HIP_EXPORT int simhip_unregister_memory(void* pointer) {
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mutex);
  const auto found = runtime.allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == runtime.allocations.end() || found->second.owned) return 1;
  runtime.allocations.erase(found);
  return 0;
}

HIP_EXPORT int simhip_find_memory(const void* pointer, void** base, size_t* bytes) {
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mutex);
  const auto key = reinterpret_cast<uintptr_t>(pointer);
  auto found = runtime.allocations.upper_bound(key);
  if (found == runtime.allocations.begin()) return 1;
  --found;
  if (key - found->first >= found->second.bytes) return 1;
  *base = reinterpret_cast<void*>(found->first);
  *bytes = found->second.bytes;
  return 0;
}
