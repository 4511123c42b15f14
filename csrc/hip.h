// The few HIP functions the shim calls, found in the HIP runtime when they are first needed.
//
// Nothing is linked against HIP, so the shim builds and loads on a machine without ROCm.
#pragma once

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

// Name, result, parameters.
#define JAX_SPARSE_MLA_HIP_FUNCTIONS(FUNCTION)                                             \
  FUNCTION(hipGetDevice, hipError_t, int*)                                                 \
  FUNCTION(hipSetDevice, hipError_t, int)                                                  \
  FUNCTION(hipGetDevicePropertiesR0600, hipError_t, HipDeviceProperties*, int)             \
  FUNCTION(hipModuleLoadData, hipError_t, hipModule_t*, const void*)                       \
  FUNCTION(hipModuleUnload, hipError_t, hipModule_t)                                       \
  FUNCTION(hipModuleGetFunction, hipError_t, hipFunction_t*, hipModule_t, const char*)     \
  FUNCTION(hipModuleLaunchKernel, hipError_t, hipFunction_t, unsigned, unsigned, unsigned, \
           unsigned, unsigned, unsigned, unsigned, hipStream_t, void**, void**)            \
  FUNCTION(hipGetErrorName, const char*, hipError_t)                                       \
  FUNCTION(hipGetErrorString, const char*, hipError_t)                                     \
  FUNCTION(hipGetLastError, hipError_t)

struct Hip {
  // The table of the process, loaded by the first call. A library or function that is missing is
  // an error, after which the next call tries again.
  static const Hip& Get();

  // Throws an error that names the function and the code, unless the code is hipSuccess.
  void Check(const char* function, hipError_t code) const;

  // Runs body with a device current on this thread, and makes the former one current again.
  template <typename Body>
  void OnDevice(int device, Body body) const;

#define MEMBER(name, result, ...) result (*name)(__VA_ARGS__);
  JAX_SPARSE_MLA_HIP_FUNCTIONS(MEMBER)
#undef MEMBER
};

template <typename Body>
void Hip::OnDevice(int device, Body body) const {
  int former = device;
  Check("hipGetDevice", hipGetDevice(&former));
  if (former == device) return body();
  Check("hipSetDevice", hipSetDevice(device));
  try {
    body();
  } catch (...) {
    if (hipSetDevice(former) != 0) hipGetLastError();  // the first error is the one to report
    throw;
  }
  Check("hipSetDevice", hipSetDevice(former));
}

}  // namespace jax_sparse_mla
