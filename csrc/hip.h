// The few HIP functions the shim calls, found in the HIP runtime when they are first needed.
//
// Nothing is linked against HIP, so the shim builds and loads on a machine without ROCm.
#ifndef JAX_SPARSE_MLA_HIP_H_
#define JAX_SPARSE_MLA_HIP_H_

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

struct Hip {
  // The table of the process, loaded by the first call. A library or function that is missing is
  // an error, after which the next call tries again.
  static const Hip& Get();

  // Throws an error that names the function and the code, unless the code is hipSuccess.
  void Check(const char* function, hipError_t code) const;

  // Runs body with a device current on this thread, and makes the former one current again.
  template <typename Body>
  void OnDevice(int device, Body body) const;

  hipError_t (*GetDevice)(int*);
  hipError_t (*SetDevice)(int);
  hipError_t (*GetDeviceProperties)(HipDeviceProperties*, int);
  hipError_t (*ModuleLoadData)(hipModule_t*, const void*);
  hipError_t (*ModuleUnload)(hipModule_t);
  hipError_t (*ModuleGetFunction)(hipFunction_t*, hipModule_t, const char*);
  hipError_t (*ModuleLaunchKernel)(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, hipStream_t, void**, void**);
  const char* (*GetErrorName)(hipError_t);
  const char* (*GetErrorString)(hipError_t);
  hipError_t (*GetLastError)();
};

template <typename Body>
void Hip::OnDevice(int device, Body body) const {
  int former = device;
  Check("hipGetDevice", GetDevice(&former));
  if (former == device) return body();
  Check("hipSetDevice", SetDevice(device));
  try {
    body();
  } catch (...) {
    if (SetDevice(former) != 0) GetLastError();  // the first error is the one to report
    throw;
  }
  Check("hipSetDevice", SetDevice(former));
}

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_HIP_H_
