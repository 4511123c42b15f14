#include "code_object.h"

#include <elf.h>

#include <cstring>
#include <optional>

namespace jax_sparse_mla {
namespace {

constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint32_t kMachMask = 0xff;
// Kernel descriptor: 64 bytes at the symbol "<kernel>.kd"; LLVM's "User Guide for AMDGPU Backend".
constexpr uint64_t kDescriptorBytes = 64;
constexpr uint64_t kGroupSegmentOffset = 0;
constexpr uint64_t kKernargOffset = 8;

// Reads of a file that may end anywhere and is aligned to nothing.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}

  bool Holds(uint64_t offset, uint64_t size) const {
    return offset <= bytes_.size() && size <= bytes_.size() - offset;
  }

  template <typename T>
  std::optional<T> Read(uint64_t offset) const {
    if (!Holds(offset, sizeof(T))) return std::nullopt;
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }

  // Entry `index` of a table at `offset`.
  template <typename T>
  std::optional<T> Read(uint64_t offset, uint64_t index) const {
    if (offset > bytes_.size() || index > bytes_.size() / sizeof(T)) return std::nullopt;
    return Read<T>(offset + index * sizeof(T));
  }

  bool TextAtIs(uint64_t offset, std::string_view text) const {
    return Holds(offset, text.size() + 1) &&
           std::memcmp(bytes_.data() + offset, text.data(), text.size()) == 0 &&
           bytes_[offset + text.size()] == '\0';
  }

 private:
  std::string_view bytes_;
};

// Every part of the file that a segment or section header names is inside the file.
bool IsWhole(const Bytes& file, const Elf64_Ehdr& header) {
  for (uint64_t i = 0; i < header.e_phnum; ++i) {
    const auto segment = file.Read<Elf64_Phdr>(header.e_phoff, i);
    if (!segment || !file.Holds(segment->p_offset, segment->p_filesz)) return false;
  }
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = file.Read<Elf64_Shdr>(header.e_shoff, i);
    if (!section) return false;
    if (section->sh_type == SHT_NOBITS || section->sh_type == SHT_NULL) continue;
    if (!file.Holds(section->sh_offset, section->sh_size)) return false;
  }
  return true;
}

// The address of a dynamic symbol.
std::optional<uint64_t> FindSymbol(const Bytes& file, const Elf64_Ehdr& header,
                                   std::string_view name) {
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = file.Read<Elf64_Shdr>(header.e_shoff, i);
    if (!section || section->sh_type != SHT_DYNSYM) continue;
    const auto names = file.Read<Elf64_Shdr>(header.e_shoff, section->sh_link);
    if (!names || section->sh_link >= header.e_shnum) continue;
    for (uint64_t j = 0; j < section->sh_size / sizeof(Elf64_Sym); ++j) {
      const auto symbol = file.Read<Elf64_Sym>(section->sh_offset, j);
      if (symbol && symbol->st_name < names->sh_size &&
          file.TextAtIs(names->sh_offset + symbol->st_name, name)) {
        return symbol->st_value;
      }
    }
  }
  return std::nullopt;
}

// The place in the file of `size` bytes at an address.
std::optional<uint64_t> FileOffset(const Bytes& file, const Elf64_Ehdr& header, uint64_t address,
                                   uint64_t size) {
  for (uint64_t i = 0; i < header.e_phnum; ++i) {
    const auto segment = file.Read<Elf64_Phdr>(header.e_phoff, i);
    if (!segment || segment->p_type != PT_LOAD || address < segment->p_vaddr) continue;
    const uint64_t inside = address - segment->p_vaddr;
    if (inside <= segment->p_filesz && size <= segment->p_filesz - inside) {
      return segment->p_offset + inside;
    }
  }
  return std::nullopt;
}

}  // namespace

ErrorOr<KernelResources> ReadCodeObject(std::string_view code, std::string_view symbol) {
  auto fault = [](const auto&... parts) { return Unexpected(InvalidArgument(parts...)); };
  const Bytes file(code);
  if (code.substr(0, SELFMAG) != std::string_view(ELFMAG, SELFMAG)) {
    return fault("attribute 'code' is not an ELF file (", code.size(), " bytes)");
  }
  const auto header = file.Read<Elf64_Ehdr>(0);
  if (!header) return fault("the code object is truncated: ", code.size(), " bytes");
  if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != ELFDATA2LSB ||
      header->e_machine != kMachineAmdgpu) {
    return fault("the code object is not a 64-bit AMDGPU ELF: class ",
                 int{header->e_ident[EI_CLASS]}, ", machine ", header->e_machine);
  }
  if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_shentsize != sizeof(Elf64_Shdr)) {
    return fault("the code object has headers of an unknown size");
  }
  if (!IsWhole(file, *header)) {
    return fault("the code object is truncated: its headers name parts beyond its ", code.size(),
                 " bytes");
  }
  const auto address = FindSymbol(file, *header, std::string(symbol) + ".kd");
  if (symbol.empty() || !address) {
    return fault("the code object has no kernel '", symbol, "'");
  }
  const auto descriptor = FileOffset(file, *header, *address, kDescriptorBytes);
  if (!descriptor) {
    return fault("the code object's descriptor of kernel '", symbol, "' lies outside its segments");
  }
  return KernelResources{*file.Read<uint32_t>(*descriptor + kGroupSegmentOffset),
                         *file.Read<uint32_t>(*descriptor + kKernargOffset)};
}

std::string CodeObjectArch(std::string_view code) {
  const auto header = Bytes(code).Read<Elf64_Ehdr>(0);
  const uint32_t mach = header ? header->e_flags & kMachMask : 0;
  switch (mach) {
    case 0x30:
      return "gfx908";
    case 0x3f:
      return "gfx90a";
    case 0x4c:
      return "gfx942";
    case 0x4f:
      return "gfx950";
    default:
      return "EF_AMDGPU_MACH " + std::to_string(mach);
  }
}

}  // namespace jax_sparse_mla
