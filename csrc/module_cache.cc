#include "module_cache.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "sha256.h"

namespace jax_sparse_mla {
namespace {

class Module {
 public:
  // Null if this symbol was not asked for yet.
  const Kernel* Find(std::string_view symbol) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kernel = kernels_.find(symbol);
    return kernel == kernels_.end() ? nullptr : &kernel->second;
  }

  ErrorOr<const Kernel*> FindOrLoad(const Hip& hip, int device, const KernelSource& source,
                                    Kernel kernel);

 private:
  Error Load(const Hip& hip, int device, const KernelSource& source, Kernel& kernel);

  std::mutex mutex_;
  hipModule_t module_ = nullptr;
  std::vector<char> code_;
  std::map<std::string, Kernel, std::less<>> kernels_;
};

using Key = std::pair<int, Sha256Digest>;

struct Cache {
  std::mutex mutex;  // guards the map only; never held during a call to HIP
  std::map<Key, std::unique_ptr<Module>> modules;

  static Cache& Get() {
    static Cache& cache = *new Cache;
    return cache;
  }
};

Error CheckDeviceArch(const Hip& hip, int device, const std::string& arch) {
  HipDeviceProperties properties{};
  if (Error error = hip.GetDeviceProperties(hip, &properties, device); error.failure()) {
    return error;
  }
  // "gfx950:sramecc+:xnack-"
  const std::string_view name(properties.gcn_arch_name,
                              strnlen(properties.gcn_arch_name, sizeof properties.gcn_arch_name));
  const std::string_view device_arch = name.substr(0, name.find(':'));
  if (device_arch == arch) return Error::Success();
  return MakeError(ErrorCode::kFailedPrecondition, "the kernel is compiled for ", arch,
                   " but device ", device, " is ", device_arch,
                   "; pass implementation=\"reference\" to run there");
}

ErrorOr<const Kernel*> Module::FindOrLoad(const Hip& hip, int device, const KernelSource& source,
                                          Kernel kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kernels_.find(source.symbol);
  if (found != kernels_.end()) return &found->second;

  CurrentDevice current(hip);
  if (Error error = current.Set(device); error.failure()) return Unexpected(error);
  if (Error error = Load(hip, device, source, kernel); error.failure()) return Unexpected(error);
  const Kernel* kept = &kernels_.emplace(source.symbol, std::move(kernel)).first->second;
  if (Error error = current.Restore(); error.failure()) return Unexpected(error);
  return kept;
}

Error Module::Load(const Hip& hip, int device, const KernelSource& source, Kernel& kernel) {
  const std::string symbol(source.symbol);
  if (module_ != nullptr) {
    return hip.ModuleGetFunction(hip, &kernel.function, module_, symbol.c_str());
  }
  if (Error error = CheckDeviceArch(hip, device, kernel.arch); error.failure()) return error;
  // HIP keeps pointing into the image as long as the module lives, the executable that carries the
  // attribute may be gone earlier.
  std::vector<char> code(source.code.begin(), source.code.end());
  hipModule_t module = nullptr;
  if (Error error = hip.ModuleLoadData(hip, &module, code.data()); error.failure()) return error;
  if (Error error = hip.ModuleGetFunction(hip, &kernel.function, module, symbol.c_str());
      error.failure()) {
    hip.ModuleUnload(hip, module);
    return error;
  }
  module_ = module;
  code_ = std::move(code);
  return Error::Success();
}

Error CheckArchAttribute(const KernelSource& source, const std::string& arch) {
  if (source.arch == arch) return Error::Success();
  return InvalidArgument("attribute 'arch' is '", source.arch, "' but the code object is for ",
                         arch);
}

// Everything that can be known of the code object without HIP.
ErrorOr<Kernel> Check(const KernelSource& source, const Sha256Digest& hash) {
  if (Sha256(source.code) != hash) {
    return Unexpected(InvalidArgument("attribute 'code' (", source.code.size(),
                                      " bytes) does not have the hash that 'code_hash' gives"));
  }
  ErrorOr<KernelResources> resources = ReadCodeObject(source.code, source.symbol);
  if (resources.has_error()) return Unexpected(resources.error());
  Kernel kernel{nullptr, *resources, CodeObjectArch(source.code)};
  if (Error error = CheckArchAttribute(source, kernel.arch); error.failure()) {
    return Unexpected(error);
  }
  return kernel;
}

}  // namespace

ErrorOr<const Kernel*> FindKernel(const Hip& hip, int device, const KernelSource& source) {
  if (device < 0) {
    return Unexpected(MakeError(ErrorCode::kInternal, "XLA gave device ordinal ", device));
  }
  Key key{device, {}};
  if (source.code_hash.size() != key.second.size()) {
    return Unexpected(InvalidArgument("attribute 'code_hash' must have ", key.second.size(),
                                      " bytes, got ", source.code_hash.size()));
  }
  std::memcpy(key.second.data(), source.code_hash.data(), key.second.size());

  Cache& cache = Cache::Get();
  Module* module = nullptr;
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (const auto found = cache.modules.find(key); found != cache.modules.end()) {
      module = found->second.get();
    }
  }
  const Kernel* kernel = module == nullptr ? nullptr : module->Find(source.symbol);
  if (kernel != nullptr) {
    if (Error error = CheckArchAttribute(source, kernel->arch); error.failure()) {
      return Unexpected(error);
    }
    return kernel;
  }

  ErrorOr<Kernel> checked = Check(source, key.second);
  if (checked.has_error()) return Unexpected(checked.error());
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    std::unique_ptr<Module>& slot = cache.modules[key];
    if (slot == nullptr) slot = std::make_unique<Module>();
    module = slot.get();
  }
  return module->FindOrLoad(hip, device, source, *std::move(checked));
}

}  // namespace jax_sparse_mla
