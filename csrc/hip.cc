#include "hip.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace jax_sparse_mla {
namespace {

constexpr char kLibraryVariable[] = "JAX_SPARSE_MLA_HIP_LIBRARY";

ErrorOr<void*> OpenLibrary() {
  if (const char* path = std::getenv(kLibraryVariable); path != nullptr && *path != '\0') {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
    const char* reason = dlerror();
    return Unexpected(MakeError(ErrorCode::kUnavailable, "cannot load the HIP library that ",
                                kLibraryVariable, " names: ", reason ? reason : path));
  }
  // A copy that the process has already (the JAX plugin's) comes before any other: two HIP
  // runtimes in one process do not share streams.
  for (int flags : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags)) return library;
    }
  }
  const char* reason = dlerror();
  return Unexpected(MakeError(
      ErrorCode::kUnavailable,
      "no HIP runtime found (libamdhip64.so.7, .so.6, .so): ", reason ? reason : "unknown reason",
      ". Install ROCm or the JAX ROCm plugin, or name a library in ", kLibraryVariable));
}

}  // namespace

Error Hip::Load(void* library) {
  const char* missing = nullptr;
  auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr && missing == nullptr) missing = name;
    return symbol;
  };
  auto set = [&](auto&... functions) { (functions.set(find(functions.name())), ...); };
  set(GetDevice, SetDevice, GetDeviceProperties, ModuleLoadData, ModuleUnload, ModuleGetFunction,
      ModuleLaunchKernel);
  get_error_name_ = reinterpret_cast<decltype(get_error_name_)>(find("hipGetErrorName"));
  get_error_string_ = reinterpret_cast<decltype(get_error_string_)>(find("hipGetErrorString"));
  get_last_error_ = reinterpret_cast<decltype(get_last_error_)>(find("hipGetLastError"));
  if (missing == nullptr) return Error::Success();
  return MakeError(ErrorCode::kUnavailable, "the HIP runtime has no ", missing,
                   "; ROCm 6 or later is needed");
}

ErrorOr<const Hip*> Hip::Get() {
  // Never freed: handlers may run while the process ends.
  static std::atomic<const Hip*> loaded{nullptr};
  if (const Hip* hip = loaded.load(std::memory_order_acquire)) return hip;

  static std::mutex& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Hip* hip = loaded.load(std::memory_order_relaxed)) return hip;
  std::unique_ptr<Hip> hip(new Hip);
  ErrorOr<void*> library = OpenLibrary();
  if (library.has_error()) return Unexpected(library.error());
  if (Error error = hip->Load(*library); error.failure()) {
    dlclose(*library);
    return Unexpected(error);
  }
  loaded.store(hip.get(), std::memory_order_release);
  return hip.release();
}

Error Hip::Failure(const char* function, hipError_t code) const {
  // HIP keeps the error for whoever asks next on this thread: it is reported here, and must not be
  // taken for the failure of another library's kernel.
  get_last_error_();
  const char* name = get_error_name_(code);
  const char* text = get_error_string_(code);
  return MakeError(ErrorCode::kInternal, function, " failed: ", name ? name : "unknown error", " (",
                   code, "): ", text ? text : "");
}

Error CurrentDevice::Set(int device) {
  if (Error error = hip_.GetDevice(hip_, &former_); error.failure()) return error;
  if (former_ == device) return Error::Success();
  if (Error error = hip_.SetDevice(hip_, device); error.failure()) return error;
  changed_ = true;
  return Error::Success();
}

Error CurrentDevice::Restore() {
  if (!changed_) return Error::Success();
  changed_ = false;
  return hip_.SetDevice(hip_, former_);
}

}  // namespace jax_sparse_mla
