// The few HIP functions the shim calls, found in the HIP runtime when they are first needed.
//
// Nothing is linked against HIP, so the shim builds and loads on a machine without ROCm.
#ifndef JAX_SPARSE_MLA_HIP_H_
#define JAX_SPARSE_MLA_HIP_H_

#include <string>

#include "error.h"

namespace jax_sparse_mla {

using hipError_t = int;
using hipStream_t = struct ihipStream_t*;
using hipModule_t = struct ihipModule_t*;
using hipFunction_t = struct ihipModuleSymbol_t*;

// The part of hipDeviceProp_tR0600 (ROCm 6 and later) that is read: 1,472 bytes, of which
// gcnArchName stands at 1,160. The spare bytes keep a longer struct of a later ROCm inside.
struct HipDeviceProperties {
  char before[1160];
  char gcn_arch_name[256];
  char after[4096 - 1160 - 256];
};

class Hip;

// One HIP function. A call that fails becomes an error naming the function and the code.
template <typename... Args>
class HipFunction {
 public:
  explicit HipFunction(const char* name) : name_(name) {}

  inline Error operator()(const Hip& hip, Args... args) const;
  const char* name() const { return name_; }
  void set(void* symbol) { function_ = reinterpret_cast<hipError_t (*)(Args...)>(symbol); }

 private:
  const char* name_;
  hipError_t (*function_)(Args...) = nullptr;
};

class Hip {
 public:
  // The table of the process, loaded by the first call. A library or function that is missing is
  // an error, after which the next call tries again.
  static ErrorOr<const Hip*> Get();

  Error Failure(const char* function, hipError_t code) const;

  HipFunction<int*> GetDevice{"hipGetDevice"};
  HipFunction<int> SetDevice{"hipSetDevice"};
  HipFunction<HipDeviceProperties*, int> GetDeviceProperties{"hipGetDevicePropertiesR0600"};
  HipFunction<hipModule_t*, const void*> ModuleLoadData{"hipModuleLoadData"};
  HipFunction<hipModule_t> ModuleUnload{"hipModuleUnload"};
  HipFunction<hipFunction_t*, hipModule_t, const char*> ModuleGetFunction{"hipModuleGetFunction"};
  HipFunction<hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
              hipStream_t, void**, void**>
      ModuleLaunchKernel{"hipModuleLaunchKernel"};

 private:
  Hip() = default;
  Error Load(void* library);

  const char* (*get_error_name_)(hipError_t) = nullptr;
  const char* (*get_error_string_)(hipError_t) = nullptr;
  hipError_t (*get_last_error_)() = nullptr;
};

template <typename... Args>
inline Error HipFunction<Args...>::operator()(const Hip& hip, Args... args) const {
  const hipError_t code = function_(args...);
  return code == 0 ? Error::Success() : hip.Failure(name_, code);
}

// Makes a device current on this thread, and the former one again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Hip& hip) : hip_(hip) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { Restore(); }

  Error Set(int device);
  Error Restore();

 private:
  const Hip& hip_;
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_HIP_H_
