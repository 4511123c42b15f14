// What the shim checks of an AMDGPU code object before HIP may see it.
#pragma once

#include "contract.h"

namespace jax_sparse_mla {

// Checks that the code has its hash, that it is a whole 64-bit AMDGPU ELF (HIP itself reads past
// the end of a truncated one) for the arch, and that it has the kernel, with this LDS and the
// contract's arguments.
void CheckCodeObject(const Attributes& call);

}  // namespace jax_sparse_mla
