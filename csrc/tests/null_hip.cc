// A HIP library in which every call succeeds at once, so that what is measured is the shim.

#include <cstring>

#include "hip.h"

using namespace jax_sparse_mla;

namespace {

template <typename Handle>
Handle SomeHandle() {
  static int object;
  return reinterpret_cast<Handle>(&object);
}

}  // namespace

#define HIP_EXPORT extern "C" __attribute__((visibility("default")))

HIP_EXPORT int hipGetDevice(int* device) {
  *device = 0;
  return 0;
}
HIP_EXPORT int hipSetDevice(int) { return 0; }
HIP_EXPORT int hipGetDevicePropertiesR0600(HipDeviceProperties* properties, int) {
  std::strcpy(properties->gcn_arch_name, "gfx950:sramecc+:xnack-");
  return 0;
}
HIP_EXPORT int hipModuleLoadData(hipModule_t* module, const void*) {
  *module = SomeHandle<hipModule_t>();
  return 0;
}
HIP_EXPORT int hipModuleUnload(hipModule_t) { return 0; }
HIP_EXPORT int hipModuleGetFunction(hipFunction_t* function, hipModule_t, const char*) {
  *function = SomeHandle<hipFunction_t>();
  return 0;
}
HIP_EXPORT int hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, unsigned, hipStream_t, void**, void**) {
  return 0;
}
HIP_EXPORT const char* hipGetErrorName(int) { return "none"; }
HIP_EXPORT const char* hipGetErrorString(int) { return "no call fails"; }
HIP_EXPORT int hipGetLastError() { return 0; }
