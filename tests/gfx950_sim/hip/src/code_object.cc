#include "code_object.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "msgpack.h"

namespace simhip {
namespace {

constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint8_t kOsAbiHsa = 64;
constexpr uint32_t kNoteMetadata = 32;
constexpr uint32_t kSectionNote = 7;
constexpr uint64_t kMaxImageBytes = uint64_t{1} << 30;

struct ElfHeader {
  uint8_t ident[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, program_offset, section_offset;
  uint32_t flags;
  uint16_t header_size, program_size, program_count, section_size, section_count, names;
};
static_assert(sizeof(ElfHeader) == 64);

struct SectionHeader {
  uint32_t name, type;
  uint64_t flags, address, offset, size;
  uint32_t link, info;
  uint64_t align, entry_size;
};
static_assert(sizeof(SectionHeader) == 64);

// EF_AMDGPU_MACH values of the machines a wrong code object is likely to be for.
struct Machine {
  uint32_t flag;
  const char* arch;
};
constexpr Machine kMachines[] = {{0x02c, "gfx900"},  {0x02f, "gfx906"},  {0x030, "gfx908"},
                                 {0x03f, "gfx90a"},  {0x04c, "gfx942"},  {0x04f, "gfx950"},
                                 {0x036, "gfx1030"}, {0x041, "gfx1100"}, {0x04e, "gfx1201"}};

template <typename T>
bool ReadAt(const std::vector<uint8_t>& bytes, uint64_t offset, T* out) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return false;
  std::memcpy(out, bytes.data() + offset, sizeof(T));
  return true;
}

std::string_view Range(const std::vector<uint8_t>& bytes, uint64_t offset, uint64_t size) {
  if (offset > bytes.size() || bytes.size() - offset < size) return {};
  return {reinterpret_cast<const char*>(bytes.data()) + offset, static_cast<size_t>(size)};
}

std::string Arch(uint32_t flags) {
  for (const Machine& machine : kMachines) {
    if (machine.flag == (flags & 0xff)) return machine.arch;
  }
  return "unknown AMDGPU machine " + std::to_string(flags & 0xff);
}

// The metadata note's descriptor in one note section, empty if it has none.
std::string_view MetadataNote(std::string_view notes) {
  const auto aligned = [](uint64_t n) { return (n + 3) / 4 * 4; };
  while (notes.size() >= 12) {
    uint32_t header[3];
    std::memcpy(header, notes.data(), sizeof(header));
    const uint64_t descriptor = 12 + aligned(header[0]);
    if (notes.size() < descriptor || notes.size() - descriptor < header[1]) return {};
    if (header[2] == kNoteMetadata &&
        notes.substr(12, header[0]) == std::string_view("AMDGPU\0", 7))
      return notes.substr(descriptor, header[1]);
    notes.remove_prefix(std::min<uint64_t>(notes.size(), descriptor + aligned(header[1])));
  }
  return {};
}

Kernel ReadKernel(const Packed& entry) {
  Kernel kernel;
  kernel.symbol = std::string(entry.Text(".name"));
  kernel.argument_bytes = static_cast<uint32_t>(entry.Number(".kernarg_segment_size", 0));
  kernel.lds_bytes = static_cast<uint32_t>(entry.Number(".group_segment_fixed_size", 0));
  kernel.private_bytes = static_cast<uint32_t>(entry.Number(".private_segment_fixed_size", 0));
  kernel.max_block = static_cast<uint32_t>(entry.Number(".max_flat_workgroup_size", 1024));
  kernel.vgprs = static_cast<uint32_t>(entry.Number(".vgpr_count", 0));
  if (const Packed* block = entry.Find(".reqd_workgroup_size");
      block != nullptr && block->items.size() == 3) {
    for (int i = 0; i < 3; ++i)
      kernel.required_block[i] = static_cast<uint32_t>(block->items[i].number);
  }
  if (const Packed* arguments = entry.Find(".args"); arguments != nullptr) {
    for (const Packed& item : arguments->items) {
      KernelArgument argument;
      argument.offset = static_cast<uint32_t>(item.Number(".offset", 0));
      argument.size = static_cast<uint32_t>(item.Number(".size", 0));
      argument.hidden = item.Text(".value_kind").substr(0, 7) == "hidden_";
      kernel.arguments.push_back(argument);
    }
  }
  return kernel;
}

bool ArgumentsFit(const Kernel& kernel) {
  return std::all_of(kernel.arguments.begin(), kernel.arguments.end(), [&](const auto& argument) {
    return uint64_t{argument.offset} + argument.size <= kernel.argument_bytes;
  });
}

}  // namespace

hipError_t ReadCodeObject(const void* image, CodeObject* out, std::string* text) {
  const auto refuse = [&](std::string reason) {
    *text = "not a loadable code object: " + std::move(reason);
    return hipErrorInvalidImage;
  };
  // The magic first: a caller's buffer may be shorter than an ELF header.
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0)
    return refuse("no ELF magic");
  ElfHeader header;
  std::memcpy(&header, image, sizeof(header));
  if (header.ident[4] != 2 || header.ident[5] != 1) return refuse("not a little-endian ELF64");
  if (header.machine != kMachineAmdgpu || header.ident[7] != kOsAbiHsa)
    return refuse("not for AMDGPU under HSA (machine " + std::to_string(header.machine) + ")");
  if (header.section_size != sizeof(SectionHeader) || header.section_count == 0)
    return refuse("no section table");
  const uint64_t size =
      header.section_offset + uint64_t{header.section_count} * header.section_size;
  if (header.section_offset > kMaxImageBytes) return refuse("section table out of range");

  const auto* data = static_cast<const uint8_t*>(image);
  out->bytes.assign(data, data + size);
  out->arch = Arch(header.flags);

  std::string_view metadata;
  for (unsigned i = 0; i < header.section_count; ++i) {
    SectionHeader section;
    if (!ReadAt(out->bytes, header.section_offset + i * sizeof(section), &section))
      return refuse("section table cut short");
    if (section.type != kSectionNote) continue;
    metadata = MetadataNote(Range(out->bytes, section.offset, section.size));
    if (!metadata.empty()) break;
  }
  if (metadata.empty()) return refuse("no NT_AMDGPU_METADATA note");
  const auto root = Unpack(metadata);
  const Packed* kernels = root ? root->Find("amdhsa.kernels") : nullptr;
  if (kernels == nullptr) return refuse("malformed metadata note");
  for (const Packed& entry : kernels->items) {
    Kernel kernel = ReadKernel(entry);
    if (!ArgumentsFit(kernel)) return refuse("an argument lies outside the argument segment");
    const std::string name = kernel.symbol;
    out->kernels.emplace(name, std::move(kernel));
  }
  return hipSuccess;
}

}  // namespace simhip
