#include "module_cache.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "code_object.h"
#include "error.h"

namespace jax_sparse_mla {
namespace {

struct Slot {
  std::mutex loading;
  // HIP keeps pointing into the image as long as the module lives, the executable that carries the
  // attribute may be gone earlier.
  std::vector<char> code;
  std::atomic<hipFunction_t> function{nullptr};
};

// Device, code_hash, symbol, arch, lds_bytes: all that is checked against the code. Only what has
// passed gets a slot, so that a hit needs no check.
using Key = std::tuple<int, std::string, std::string, std::string, int32_t>;
using KeyView = std::tuple<int, std::string_view, std::string_view, std::string_view, int32_t>;

void CheckDevice(const Hip& hip, int device, std::string_view arch) {
  HipDeviceProperties properties{};
  hip.Check("hipGetDevicePropertiesR0600", hip.hipGetDevicePropertiesR0600(&properties, device));
  // "gfx950:sramecc+:xnack-"
  const std::string_view name = properties.gcn_arch_name;
  const std::string_view device_arch = name.substr(0, name.find(':'));
  if (device_arch == arch) return;
  Fail(ErrorCode::kFailedPrecondition, "the kernel is compiled for ", arch, " but device ", device,
       " is ", device_arch, "; pass implementation=\"reference\" to run there");
}

}  // namespace

hipFunction_t FindKernel(const Hip& hip, int device, const Attributes& call) {
  // Never freed: handlers may run while the process ends. The mutex guards the map alone and is
  // never held during a call to HIP.
  static std::mutex mutex;
  static auto& slots = *new std::map<Key, Slot, std::less<>>;
  const KeyView key{device, call.code_hash, call.symbol, call.arch, call.lds_bytes};
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = slots.find(key);
    if (found != slots.end() && found->second.function) return found->second.function;
  }

  if (device < 0) Fail(ErrorCode::kInternal, "XLA gave device ordinal ", device);
  CheckCodeObject(call);
  std::unique_lock<std::mutex> lock(mutex);
  Slot& slot = slots.try_emplace(Key(key)).first->second;
  lock.unlock();
  std::lock_guard<std::mutex> loading(slot.loading);
  if (slot.function != nullptr) return slot.function;  // another thread's load
  hip.OnDevice(device, [&] {
    CheckDevice(hip, device, call.arch);
    slot.code.assign(call.code.begin(), call.code.end());
    const std::string symbol(call.symbol);
    hipModule_t module = nullptr;
    hipFunction_t function = nullptr;
    hip.Check("hipModuleLoadData", hip.hipModuleLoadData(&module, slot.code.data()));
    const hipError_t found = hip.hipModuleGetFunction(&function, module, symbol.c_str());
    if (found != 0) hip.hipModuleUnload(module);
    hip.Check("hipModuleGetFunction", found);
    slot.function = function;
  });
  return slot.function;
}

}  // namespace jax_sparse_mla
