#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/rref/checkpoint.h"
#include "stitch/rref/tensor_stream.h"

namespace stitch::rref {

// The contents of a manifest (docs/checkpoints.md).
struct Manifest {
  // Of one owner's tensors of a part. `parameters` have the fields of their tensors alone; the file
  // says the rest.
  struct File {
    std::string owner, file, checksum;
    std::uint64_t bytes = 0;
    std::vector<StoredParameter> parameters;
  };
  struct Part {
    std::string type;  // "tensors", or of an optimizer
    CheckpointValues options;
    std::vector<File> files;
  };
  CheckpointValues values;
  std::map<std::string, Part> parts;
};

// As the text of a file, with a checksum. Throws Error(invalid_argument) for a text that is not
// UTF-8.
[[nodiscard]] std::string write_manifest(const Manifest& manifest);
// Back again. Throws Error(invalid_argument) with the reason alone.
[[nodiscard]] Manifest read_manifest(std::string_view text);

// For fuzzing: read_manifest() of a text whose checksum is right.
[[nodiscard]] Manifest parse_manifest(std::string_view text);

}  // namespace stitch::rref
