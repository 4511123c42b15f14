#include "msgpack.h"

namespace simhip {
namespace {

constexpr int kMaxDepth = 16;

class Decoder {
 public:
  explicit Decoder(std::string_view data) : data_(data) {}

  bool Value(Packed* out, int depth) {
    uint64_t tag = 0;
    if (depth > kMaxDepth || !Unsigned(1, &tag)) return false;
    if (tag <= 0x7f) return SetNumber(out, tag);
    if (tag <= 0x8f) return Items(out, Packed::Kind::kMap, 2 * (tag & 0xf), depth);
    if (tag <= 0x9f) return Items(out, Packed::Kind::kArray, tag & 0xf, depth);
    if (tag <= 0xbf) return String(out, tag & 0x1f);
    switch (tag) {
      case 0xc0:
        return true;
      case 0xc2:
      case 0xc3:
        return SetNumber(out, tag - 0xc2);
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        out->kind = Packed::Kind::kUnsigned;
        return Unsigned(1u << (tag - 0xcc), &out->number);
      case 0xd9:
      case 0xda:
      case 0xdb: {
        uint64_t size = 0;
        return Unsigned(1u << (tag - 0xd9), &size) && String(out, size);
      }
      case 0xdc:
      case 0xdd: {
        uint64_t count = 0;
        return Unsigned(tag == 0xdc ? 2 : 4, &count) &&
               Items(out, Packed::Kind::kArray, count, depth);
      }
      case 0xde:
      case 0xdf: {
        uint64_t count = 0;
        return Unsigned(tag == 0xde ? 2 : 4, &count) &&
               Items(out, Packed::Kind::kMap, 2 * count, depth);
      }
      default:  // floats, signed integers, binary and extensions do not occur in the metadata
        return false;
    }
  }

 private:
  static bool SetNumber(Packed* out, uint64_t number) {
    out->kind = Packed::Kind::kUnsigned;
    out->number = number;
    return true;
  }

  bool Unsigned(unsigned bytes, uint64_t* out) {
    if (data_.size() < bytes) return false;
    *out = 0;
    for (unsigned i = 0; i < bytes; ++i) *out = *out << 8 | static_cast<uint8_t>(data_[i]);
    data_.remove_prefix(bytes);
    return true;
  }

  bool String(Packed* out, uint64_t size) {
    if (data_.size() < size) return false;
    out->kind = Packed::Kind::kString;
    out->text = data_.substr(0, size);
    data_.remove_prefix(size);
    return true;
  }

  bool Items(Packed* out, Packed::Kind kind, uint64_t count, int depth) {
    out->kind = kind;
    if (count > data_.size()) return false;  // each item takes a byte at least
    out->items.resize(count);
    for (Packed& item : out->items) {
      if (!Value(&item, depth + 1)) return false;
    }
    return true;
  }

  std::string_view data_;
};

}  // namespace

const Packed* Packed::Find(std::string_view key) const {
  if (kind != Kind::kMap) return nullptr;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i].kind == Kind::kString && items[i].text == key) return &items[i + 1];
  }
  return nullptr;
}

uint64_t Packed::Number(std::string_view key, uint64_t otherwise) const {
  const Packed* value = Find(key);
  return value != nullptr && value->kind == Kind::kUnsigned ? value->number : otherwise;
}

std::string_view Packed::Text(std::string_view key) const {
  const Packed* value = Find(key);
  return value != nullptr && value->kind == Kind::kString ? value->text : std::string_view();
}

std::optional<Packed> Unpack(std::string_view data) {
  Packed value;
  if (!Decoder(data).Value(&value, 0)) return std::nullopt;
  return value;
}

}  // namespace simhip
