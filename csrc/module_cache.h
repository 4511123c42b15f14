// The process's loaded code objects: one HIP module per device and content hash.
#ifndef JAX_SPARSE_MLA_MODULE_CACHE_H_
#define JAX_SPARSE_MLA_MODULE_CACHE_H_

#include <string>
#include <string_view>

#include "code_object.h"
#include "hip.h"

namespace jax_sparse_mla {

// A kernel as a call site names it.
struct KernelSource {
  std::string_view code;       // the code object
  std::string_view code_hash;  // its SHA-256, 32 bytes
  std::string_view symbol;
  std::string_view arch;  // what the caller compiled for, e.g. "gfx950"
};

// A kernel ready to launch on one device.
struct Kernel {
  hipFunction_t function = nullptr;
  KernelResources resources;
  std::string arch;
};

// Finds the kernel on a device, loading its code object if no call did before. Threads that ask
// for the same code object wait for one load; others are not held up. What was found stays valid
// until the process ends: modules are never unloaded, because executables come and go and HIP may
// be gone at exit. A failed load leaves nothing behind, and the next call tries again.
ErrorOr<const Kernel*> FindKernel(const Hip& hip, int device, const KernelSource& source);

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_MODULE_CACHE_H_
