// What the shim has to know of an AMDGPU code object before HIP may see it.
#ifndef JAX_SPARSE_MLA_CODE_OBJECT_H_
#define JAX_SPARSE_MLA_CODE_OBJECT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"

namespace jax_sparse_mla {

// The resources of one kernel, from its kernel descriptor.
struct KernelResources {
  uint32_t group_segment_bytes = 0;  // LDS
  uint32_t kernarg_bytes = 0;
};

// Checks that `code` is a whole 64-bit AMDGPU ELF (HIP itself reads past the end of a truncated
// one) that contains the kernel `symbol`, and reads the kernel's resources.
ErrorOr<KernelResources> ReadCodeObject(std::string_view code, std::string_view symbol);

// The processor that the code object is for, e.g. "gfx950"; call after ReadCodeObject.
// Source of the numbers: LLVM's "User Guide for AMDGPU Backend", ELF header, EF_AMDGPU_MACH.
std::string CodeObjectArch(std::string_view code);

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_CODE_OBJECT_H_
