// Decoder for the part of MessagePack that AMDGPU metadata uses (https://msgpack.org/index.html).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace simhip {

struct Packed {
  enum class Kind { kNil, kUnsigned, kString, kArray, kMap };
  Kind kind = Kind::kNil;
  uint64_t number = 0;
  std::string_view text;
  std::vector<Packed> items;  // an array's values, or a map's keys and values in turn

  const Packed* Find(std::string_view key) const;
  uint64_t Number(std::string_view key, uint64_t otherwise) const;
  std::string_view Text(std::string_view key) const;
};

// The value `data` holds, nothing if it is malformed or nested deeper than metadata ever is.
std::optional<Packed> Unpack(std::string_view data);

}  // namespace simhip
