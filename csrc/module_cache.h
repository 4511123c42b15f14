// The process's loaded code objects: one HIP module per device, content hash and kernel.
#pragma once

#include "contract.h"
#include "hip.h"

namespace jax_sparse_mla {

// Finds the kernel on a device. The first call checks the code object and loads it. Threads that
// ask for the same kernel on the same device wait for one load; others are not held up. What was
// found stays valid until the process ends: modules are never unloaded, because executables come
// and go and HIP may be gone at exit. A failed load leaves no module behind, and the next call
// tries again.
hipFunction_t FindKernel(const Hip& hip, int device, const Attributes& call);

}  // namespace jax_sparse_mla
