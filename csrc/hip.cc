#include "hip.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "error.h"

namespace jax_sparse_mla {
namespace {

constexpr char kLibraryVariable[] = "JAX_SPARSE_MLA_HIP_LIBRARY";

void* OpenLibrary() {
  if (const char* path = std::getenv(kLibraryVariable); path != nullptr && *path != '\0') {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
    Fail(ErrorCode::kUnavailable, "cannot load the HIP library that ", kLibraryVariable,
         " names: ", dlerror());
  }
  // A copy that the process has already (the JAX plugin's) comes before any other: two HIP
  // runtimes in one process do not share streams.
  for (int flags : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags)) return library;
    }
  }
  Fail(ErrorCode::kUnavailable, "no HIP runtime found (libamdhip64.so.7, .so.6, .so): ", dlerror(),
       ". Install ROCm or the JAX ROCm plugin, or name a library in ", kLibraryVariable);
}

}  // namespace

const Hip& Hip::Get() {
  static std::mutex mutex;
  static Hip hip;
  static bool loaded = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded) return hip;
  void* library = OpenLibrary();
  const char* missing = nullptr;
#define FIND(name, ...)                                               \
  hip.name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if (hip.name == nullptr && missing == nullptr) missing = #name;
  JAX_SPARSE_MLA_HIP_FUNCTIONS(FIND)
#undef FIND
  if (missing != nullptr) {
    dlclose(library);
    Fail(ErrorCode::kUnavailable, "the HIP runtime has no ", missing,
         "; ROCm 6 or later is needed");
  }
  loaded = true;
  return hip;
}

void Hip::Check(const char* function, hipError_t code) const {
  if (code == 0) return;
  // HIP keeps the error for whoever asks next on this thread: it is reported here, and must not be
  // taken for the failure of another library's kernel.
  hipGetLastError();
  const char* name = hipGetErrorName(code);
  const char* text = hipGetErrorString(code);
  Fail(ErrorCode::kInternal, function, " failed: ", name ? name : "unknown error", " (", code,
       "): ", text ? text : "");
}

}  // namespace jax_sparse_mla
