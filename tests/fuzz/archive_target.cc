#include <bitset>
#include <chrono>
#include <complex>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/dist_autograd/messages.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

struct Chain {
  int number = 0;
  std::unique_ptr<Chain> next;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number, next);
  }
};

struct Record {
  std::string name;
  std::vector<std::pair<std::uint16_t, double>> points;
  std::optional<std::map<std::string, std::vector<std::int32_t>>> table;
  std::variant<int, std::string, std::vector<bool>> choice;
  template <class Archive>
  void serialize(Archive& archive, std::uint32_t) {
    archive(name, points, table, choice);
  }
};

struct Empty {
  template <class Archive>
  void serialize(Archive&) {}
};

template <class T>
bool read_one(rpc::InMessage& message, Bytes body) {
  rpc::InArchive archive(message, body);
  T value{};
  archive(value);
  archive.check_seal();
  archive.expect_end();
  // What was read can be written, in no more memory than a peer may make us take.
  rpc::OutMessage again(rpc::wire::kRequest);
  rpc::OutArchive out(again);
  out(value);
  return true;
}

namespace pass = dist_autograd::wire;
using Reader = bool (*)(rpc::InMessage&, Bytes);
constexpr Reader kReaders[] = {
    &read_one<Record>,
    &read_one<std::vector<std::vector<std::string>>>,
    &read_one<std::map<std::string, std::list<std::optional<float>>>>,
    &read_one<std::set<char>>,
    &read_one<std::unordered_map<std::uint32_t, std::deque<std::tuple<int, char, double>>>>,
    &read_one<Chain>,
    &read_one<std::vector<Empty>>,
    &read_one<std::vector<std::unique_ptr<std::array<std::uint64_t, 8>>>>,
    &read_one<std::variant<std::bitset<70>, std::complex<double>, std::chrono::nanoseconds>>,
    &read_one<Error>,
    &read_one<std::vector<bool>>,
    &read_one<std::multimap<std::string, std::variant<std::string, std::vector<float>>>>,
    &read_one<std::tuple<pass::PassHeader, pass::Ack, std::vector<pass::GradientEntry>>>,
    &read_one<std::tuple<pass::PassHeader, pass::Mark>>,
    &read_one<std::tuple<pass::PassHeader, pass::Done>>,
    &read_one<std::tuple<pass::Release, pass::Hold>>,
};

// The input: which type, then the body of a message that should be one.
bool run(Bytes input) {
  Choices choices(input);
  const Reader read = kReaders[choices.byte() % std::size(kReaders)];
  try {
    transport::FrameBuilder builder(rpc::wire::kRequest);
    const Bytes body = choices.rest();
    builder.body().append(body.data(), body.size());
    builder.end_body();
    rpc::InMessage message(std::move(builder).finish(), WorkerInfo{"peer", WorkerId(1), 1});
    return read(message, message.view.body());
  } catch (const Error&) {
    return false;
  }
}

template <class T>
base::Bytes seed_of(std::uint8_t index, const T& value) {
  rpc::OutMessage message(rpc::wire::kRequest);
  rpc::OutArchive archive(message);
  archive(value);
  archive.seal();
  base::Bytes seed;
  base::ByteWriter(seed).write(index);
  const base::Bytes& body = message.frame.body();
  seed.append(body.data() + transport::FrameBuilder::body_offset(),
              body.size() - transport::FrameBuilder::body_offset());
  return seed;
}

std::vector<base::Bytes> seeds() {
  std::vector<base::Bytes> list;
  Record record;
  record.name = "name";
  record.points = {{1, 2.0}, {3, 4.0}};
  record.table = {{"one", {1}}, {"two", {1, 2}}};
  record.choice = std::vector<bool>{true, false, true};
  list.push_back(seed_of(0, record));
  list.push_back(seed_of(1, std::vector<std::vector<std::string>>{{"a", "b"}, {}, {"c"}}));
  list.push_back(seed_of(3, std::set<char>{'a', 'b'}));
  Chain chain;
  chain.next = std::make_unique<Chain>();
  chain.next->next = std::make_unique<Chain>();
  list.push_back(seed_of(5, chain));
  list.push_back(seed_of(9, Error(ErrorCode::timeout, "it took too long", "ps0", "add")));
  pass::GradientEntry entry;
  entry.count = 3;
  entry.undefined = {1};
  list.push_back(seed_of(12, std::tuple(pass::PassHeader{}, pass::Ack{1, {WorkerId(2)}},
                                        std::vector<pass::GradientEntry>{entry})));
  return list;
}

}  // namespace

const Target archive{"archive", run, seeds, rpc::kMaxElementMemoryForEachByte * 2,
                     rpc::kMaxElementMemoryInAnyCase + (std::size_t{4} << 20)};

}  // namespace stitch::fuzz
