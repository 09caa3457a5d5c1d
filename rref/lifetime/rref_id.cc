#include "stitch/rref/lifetime/rref_id.h"

#include "stitch/base/byte_io.h"
#include "stitch/base/hash.h"

namespace stitch::rref {

std::string to_string(const RRefId& id) {
  return "rref " + std::to_string(id.owner.id) + "." + std::to_string(id.owner.epoch) + "/" +
         std::to_string(id.creator.id) + "." + std::to_string(id.creator.epoch) + "/" +
         std::to_string(id.k);
}

void write(base::ByteWriter& out, const RRefId& id) {
  out.write(id.owner.id);
  out.write(id.owner.epoch);
  out.write(id.creator.id);
  out.write(id.creator.epoch);
  out.write(id.k);
}

RRefId read_rref_id(base::ByteReader& in) {
  RRefId id;
  id.owner.id = in.read<std::uint32_t>();
  id.owner.epoch = in.read<std::uint64_t>();
  id.creator.id = in.read<std::uint32_t>();
  id.creator.epoch = in.read<std::uint64_t>();
  id.k = in.read<std::uint64_t>();
  return id;
}

std::size_t WorkerLifeHash::operator()(const WorkerLife& life) const noexcept {
  return base::hash_of(life.epoch, life.id);
}

// One round of mixing for all fields: tables of references are looked into several times for each.
std::size_t RRefIdHash::operator()(const RRefId& id) const noexcept {
  return static_cast<std::size_t>(base::mix_bits(
      id.k + id.owner.epoch * 0x9e3779b97f4a7c15U + id.owner.id * 0xbf58476d1ce4e5b9U +
      id.creator.epoch * 0x94d049bb133111ebU + id.creator.id * 0xd6e8feb86659fd93U));
}

}  // namespace stitch::rref
