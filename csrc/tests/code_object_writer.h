// Writes small AMDGPU code objects: kernels that end at once, with the headers, symbols,
// descriptors and metadata that a loader reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_sparse_mla {

struct CodeObjectSpec {
  std::vector<std::string> kernels = {"sparse_mla_whole", "sparse_mla_partial"};
  uint32_t mach = 0x4f;  // gfx950
  uint32_t lds_bytes = 65536;
  std::vector<uint32_t> argument_sizes = {8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
  uint32_t padding = 0;  // makes otherwise equal code objects differ
};

std::string WriteCodeObject(const CodeObjectSpec& spec);

}  // namespace jax_sparse_mla
