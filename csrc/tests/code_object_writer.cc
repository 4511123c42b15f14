#include "code_object_writer.h"

#include <elf.h>

#include <cstring>
#include <tuple>

namespace jax_sparse_mla {
namespace {

constexpr uint32_t kEndProgram = 0xbf810000;  // s_endpgm

// MessagePack, as far as the metadata note needs it (https://msgpack.org).
class Packer {
 public:
  void Map(uint8_t size) { bytes_ += static_cast<char>(0x80 | size); }
  void Array(uint16_t size) {
    bytes_ += static_cast<char>(0xdc);
    bytes_ += static_cast<char>(size >> 8);
    bytes_ += static_cast<char>(size);
  }
  void Text(const std::string& text) {
    bytes_ += static_cast<char>(0xd9);
    bytes_ += static_cast<char>(text.size());
    bytes_ += text;
  }
  void Number(uint32_t value) {
    bytes_ += static_cast<char>(0xce);
    for (int shift = 24; shift >= 0; shift -= 8) bytes_ += static_cast<char>(value >> shift);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

struct Layout {
  std::vector<uint32_t> offsets;
  uint32_t size = 0;
};

Layout LayOut(const std::vector<uint32_t>& sizes) {
  Layout layout;
  for (uint32_t size : sizes) {
    layout.size = (layout.size + size - 1) / size * size;
    layout.offsets.push_back(layout.size);
    layout.size += size;
  }
  return layout;
}

std::string Metadata(const CodeObjectSpec& spec, const Layout& layout) {
  Packer packer;
  packer.Map(1);
  packer.Text("amdhsa.kernels");
  packer.Array(static_cast<uint16_t>(spec.kernels.size()));
  for (const std::string& kernel : spec.kernels) {
    packer.Map(6);
    packer.Text(".name");
    packer.Text(kernel);
    packer.Text(".symbol");
    packer.Text(kernel + ".kd");
    packer.Text(".kernarg_segment_size");
    packer.Number(layout.size);
    packer.Text(".group_segment_fixed_size");
    packer.Number(spec.lds_bytes);
    packer.Text(".max_flat_workgroup_size");
    packer.Number(256);
    packer.Text(".args");
    packer.Array(static_cast<uint16_t>(layout.offsets.size()));
    for (size_t i = 0; i < layout.offsets.size(); ++i) {
      packer.Map(3);
      packer.Text(".offset");
      packer.Number(layout.offsets[i]);
      packer.Text(".size");
      packer.Number(spec.argument_sizes[i]);
      packer.Text(".value_kind");
      packer.Text("by_value");
    }
  }
  return packer.bytes();
}

template <typename T>
void Append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void Align(std::string& out, size_t alignment) {
  out.resize((out.size() + alignment - 1) / alignment * alignment);
}

}  // namespace

std::string WriteCodeObject(const CodeObjectSpec& spec) {
  const Layout layout = LayOut(spec.argument_sizes);
  std::string file(sizeof(Elf64_Ehdr) + sizeof(Elf64_Phdr), '\0');
  std::vector<Elf64_Shdr> sections(1);
  auto add_section = [&](uint32_t type, const std::string& bytes, uint32_t link, uint64_t entry) {
    Align(file, 64);
    Elf64_Shdr section{};
    section.sh_type = type;
    section.sh_offset = section.sh_addr = file.size();
    section.sh_size = bytes.size();
    section.sh_link = link;
    section.sh_entsize = entry;
    sections.push_back(section);
    file += bytes;
    return section.sh_offset;
  };

  const std::string metadata = Metadata(spec, layout);
  std::string note;
  Append(note, uint32_t{7});
  Append(note, static_cast<uint32_t>(metadata.size()));
  Append(note, uint32_t{32});  // NT_AMDGPU_METADATA
  note.append("AMDGPU\0\0", 8);
  note += metadata;
  Align(note, 4);
  add_section(SHT_NOTE, note, 0, 0);

  std::string text;
  Append(text, kEndProgram);
  Append(text, spec.padding);
  const uint64_t text_offset = add_section(SHT_PROGBITS, text, 0, 0);
  const auto text_index = static_cast<uint16_t>(sections.size() - 1);

  std::string symbols(sizeof(Elf64_Sym), '\0');
  std::string names(1, '\0');
  for (const std::string& kernel : spec.kernels) {
    std::string descriptor(64, '\0');
    std::memcpy(descriptor.data(), &spec.lds_bytes, 4);
    std::memcpy(descriptor.data() + 8, &layout.size, 4);
    const uint64_t descriptor_offset = add_section(SHT_PROGBITS, descriptor, 0, 0);
    const auto descriptor_index = static_cast<uint16_t>(sections.size() - 1);
    for (const auto& [name, address, section] :
         {std::tuple{kernel, text_offset, text_index},
          {kernel + ".kd", descriptor_offset, descriptor_index}}) {
      Elf64_Sym symbol{};
      symbol.st_name = static_cast<uint32_t>(names.size());
      symbol.st_value = address;
      symbol.st_shndx = section;
      Append(symbols, symbol);
      names += name;
      names += '\0';
    }
  }
  const auto names_index = static_cast<uint32_t>(sections.size());
  add_section(SHT_STRTAB, names, 0, 0);
  add_section(SHT_DYNSYM, symbols, names_index, sizeof(Elf64_Sym));
  Align(file, 64);

  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_ident[EI_VERSION] = EV_CURRENT;
  header.e_ident[EI_OSABI] = 64;  // AMD HSA
  header.e_type = ET_DYN;
  header.e_machine = 224;
  header.e_version = EV_CURRENT;
  header.e_phoff = sizeof(Elf64_Ehdr);
  header.e_shoff = file.size();
  header.e_flags = 0x500 | spec.mach;
  header.e_ehsize = sizeof(Elf64_Ehdr);
  header.e_phentsize = sizeof(Elf64_Phdr);
  header.e_phnum = 1;
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = static_cast<uint16_t>(sections.size());
  Elf64_Phdr segment{};
  segment.p_type = PT_LOAD;
  segment.p_filesz = segment.p_memsz = file.size();
  std::memcpy(file.data(), &header, sizeof(header));
  std::memcpy(file.data() + sizeof(header), &segment, sizeof(segment));
  for (const Elf64_Shdr& section : sections) Append(file, section);
  return file;
}

}  // namespace jax_sparse_mla
