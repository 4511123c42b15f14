// Reads an AMDGPU code object (ELF64 with an NT_AMDGPU_METADATA note) as far as a loader needs it.
// Source: LLVM's "User Guide for AMDGPU Backend", sections ELF Code Object, Code Object V5 Metadata
// and Kernel Descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hip_types.h"

namespace simhip {

struct KernelArgument {
  uint32_t offset = 0;
  uint32_t size = 0;
  bool hidden = false;  // filled by the runtime, not by kernelParams
};

struct Kernel {
  std::string symbol;
  std::vector<KernelArgument> arguments;
  uint32_t argument_bytes = 0;
  uint32_t lds_bytes = 0;
  uint32_t private_bytes = 0;
  uint32_t max_block = 1024;
  uint32_t required_block[3] = {0, 0, 0};  // all zero: any
  uint32_t vgprs = 0;
};

struct CodeObject {
  std::vector<uint8_t> bytes;
  std::string arch;
  std::map<std::string, Kernel> kernels;  // by name without ".kd"
};

// Copies and reads the code object at `image`, whose size its own headers give. Returns hipSuccess,
// or hipErrorInvalidImage with a reason in `text`.
hipError_t ReadCodeObject(const void* image, CodeObject* out, std::string* text);

}  // namespace simhip
