#include "code_object.h"

#include <elf.h>

#include <cstring>
#include <string>
#include <vector>

#include "error.h"
#include "sha256.h"

namespace jax_sparse_mla {
namespace {

// Of LLVM's "User Guide for AMDGPU Backend": ELF header, EF_AMDGPU_MACH, kernel descriptor.
constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint32_t kMachMask = 0xff;
struct KernelDescriptor {
  uint32_t lds_bytes;
  uint32_t scratch_bytes;
  uint32_t argument_bytes;
  char others[52];
};

std::string ArchName(uint32_t mach) {
  if (mach == 0x4f) return "gfx950";
  if (mach == 0x4c) return "gfx942";
  return "EF_AMDGPU_MACH " + std::to_string(mach);
}

std::string_view Part(std::string_view file, uint64_t offset, uint64_t size) {
  Require(offset <= file.size() && size <= file.size() - offset,
          "the code object is truncated: its headers name parts beyond its ", file.size(),
          " bytes");
  return file.substr(offset, size);
}

// A copy, because the file is aligned to nothing.
template <typename T>
std::vector<T> Table(std::string_view file, uint64_t offset, uint64_t count) {
  const std::string_view part = Part(file, offset, count * sizeof(T));
  std::vector<T> table(count);
  if (!part.empty()) std::memcpy(table.data(), part.data(), part.size());
  return table;
}

// The descriptor is at the dynamic symbol "<kernel>.kd".
KernelDescriptor FindDescriptor(std::string_view file, const std::vector<Elf64_Shdr>& sections,
                                std::string_view kernel) {
  const std::string name = std::string(kernel) + ".kd";
  const std::string_view wanted(name.c_str(), name.size() + 1);  // with the zero that ends it
  for (const Elf64_Shdr& table : sections) {
    if (table.sh_type != SHT_DYNSYM || table.sh_link >= sections.size()) continue;
    const Elf64_Shdr& strings = sections[table.sh_link];
    const std::string_view names = Part(file, strings.sh_offset, strings.sh_size);
    const uint64_t count = table.sh_size / sizeof(Elf64_Sym);
    for (const Elf64_Sym& symbol : Table<Elf64_Sym>(file, table.sh_offset, count)) {
      if (symbol.st_name >= names.size()) continue;
      if (names.compare(symbol.st_name, wanted.size(), wanted) != 0) continue;
      const bool placed = symbol.st_shndx < sections.size();
      const Elf64_Shdr section = placed ? sections[symbol.st_shndx] : Elf64_Shdr{};
      const uint64_t inside = symbol.st_value - section.sh_addr;
      Require(inside <= section.sh_size && sizeof(KernelDescriptor) <= section.sh_size - inside,
              "the code object's descriptor of kernel '", kernel, "' lies outside its section");
      return Table<KernelDescriptor>(file, section.sh_offset + inside, 1)[0];
    }
  }
  Fail(ErrorCode::kInvalidArgument, "the code object has no kernel '", kernel, "'");
}

}  // namespace

void CheckCodeObject(const Attributes& call) {
  const std::string_view code = call.code;
  Require(Sha256(code) == call.code_hash, "attribute 'code' (", code.size(),
          " bytes) does not have the hash that 'code_hash' (", call.code_hash.size(),
          " bytes) gives");
  Require(code.substr(0, SELFMAG) == ELFMAG, "attribute 'code' is not an ELF file (", code.size(),
          " bytes)");

  const Elf64_Ehdr header = Table<Elf64_Ehdr>(code, 0, 1)[0];
  Require(header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_ident[EI_DATA] == ELFDATA2LSB &&
              header.e_machine == kMachineAmdgpu,
          "the code object is not a 64-bit AMDGPU ELF: class ", int{header.e_ident[EI_CLASS]},
          ", machine ", header.e_machine);
  Require(header.e_phentsize == sizeof(Elf64_Phdr) && header.e_shentsize == sizeof(Elf64_Shdr),
          "the code object has headers of an unknown size");
  for (const auto& segment : Table<Elf64_Phdr>(code, header.e_phoff, header.e_phnum)) {
    Part(code, segment.p_offset, segment.p_filesz);
  }
  const auto sections = Table<Elf64_Shdr>(code, header.e_shoff, header.e_shnum);
  for (const Elf64_Shdr& section : sections) {
    const bool in_file = section.sh_type != SHT_NOBITS && section.sh_type != SHT_NULL;
    if (in_file) Part(code, section.sh_offset, section.sh_size);
  }

  const KernelDescriptor kernel = FindDescriptor(code, sections, call.symbol);
  const std::string arch = ArchName(header.e_flags & kMachMask);
  Require(call.arch == arch, "attribute 'arch' is '", call.arch, "' but the code object is for ",
          arch);
  Require(call.lds_bytes == int64_t{kernel.lds_bytes}, "attribute 'lds_bytes' is ", call.lds_bytes,
          " but the kernel has ", kernel.lds_bytes, " bytes of LDS");
  // The segment's size may be rounded up to its alignment.
  const uint32_t bytes = kernel.argument_bytes;
  Require(bytes >= kArgumentBytes && bytes <= sizeof(KernelArguments), "the kernel takes ", bytes,
          " bytes of arguments, launch contract " JAX_SPARSE_MLA_CONTRACT_VERSION " has ",
          kArgumentBytes);
}

}  // namespace jax_sparse_mla
