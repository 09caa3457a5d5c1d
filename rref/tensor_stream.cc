#include "stitch/rref/tensor_stream.h"

#include <algorithm>
#include <sstream>

#include "stitch/base/error.h"
#include "stitch/base/printable.h"
#include "stitch/rref/files/file_tensors.h"

namespace stitch::rref {

std::string StoredParameter::text() const {
  std::ostringstream out;
  out << base::printable(dtype) << ' ' << at::IntArrayRef(sizes);
  return out.str();
}

namespace {

// So that the list of pieces takes no more memory than a message may.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 44;

}  // namespace

TensorStream::TensorStream(const std::vector<StoredParameter>& parameters) {
  std::uint64_t end = 0;
  for (const auto& parameter : parameters) {
    auto& begins = begins_.emplace_back();
    for (const auto& tensor : parameter.tensors) {
      begins.push_back(end);
      const auto* const type = files::find_type(&files::ElementType::safetensors, tensor.dtype);
      const auto count = files::count_elements(tensor.sizes);
      const bool negative = std::any_of(tensor.sizes.begin(), tensor.sizes.end(),
                                        [](std::int64_t size) { return size < 0; });
      std::uint64_t bytes = 0;
      if (type == nullptr || !count || negative ||
          __builtin_mul_overflow(*count, c10::elementSize(type->type), &bytes) ||
          __builtin_add_overflow(end, bytes, &end) || end > kMaxBytes)
        files::refuse(files::tensor_text(parameter.name_of(tensor)) +
                      " has a type or sizes that no tensor has");
    }
    begins.push_back(end);
  }
  begins_.push_back({end});
}

std::vector<TensorStream::Piece> TensorStream::pieces() const {
  std::vector<Piece> pieces;
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i + 1 < begins_.size(); ++i) {
    const std::uint64_t end = begins_[i].back();
    const bool follows_in_piece = begins_[i + 1].back() - begin <= kPieceBytes;
    if (follows_in_piece && i + 2 < begins_.size()) continue;
    for (; begin < end; begin += pieces.back().bytes)
      pieces.push_back({begin, std::min(kPieceBytes, end - begin)});
  }
  return pieces;
}

std::vector<TensorStream::Slice> TensorStream::slices(const Piece& piece) const {
  if (piece.bytes > kPieceBytes || piece.begin > bytes() || piece.bytes > bytes() - piece.begin) {
    throw Error(ErrorCode::out_of_range, "piece of " + std::to_string(piece.bytes) +
                                             " bytes from byte " + std::to_string(piece.begin) +
                                             " on does not exist: there are " +
                                             std::to_string(bytes()) + ", in pieces of at most " +
                                             std::to_string(kPieceBytes));
  }
  std::vector<Slice> slices;
  const std::uint64_t end = piece.begin + piece.bytes;
  const auto first = std::partition_point(begins_.begin(), begins_.end(), [&](const auto& begins) {
    return begins.back() <= piece.begin;
  });
  for (auto of = first; of != begins_.end() && of->front() < end; ++of) {
    for (std::size_t k = 0; k + 1 < of->size(); ++k) {
      const std::uint64_t from = std::max(piece.begin, (*of)[k]);
      const std::uint64_t to = std::min(end, (*of)[k + 1]);
      if (from < to)
        slices.push_back({static_cast<std::size_t>(of - begins_.begin()), k, from - (*of)[k],
                          from - piece.begin, to - from});
    }
  }
  return slices;
}

}  // namespace stitch::rref
