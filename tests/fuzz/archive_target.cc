#include <array>
#include <bitset>
#include <chrono>
#include <complex>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::archives {

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

// The bytes that a value is written as.
template <class T>
static base::Bytes written(const T& value) {
  rpc::OutMessage message(rpc::wire::kRequest);
  rpc::OutArchive archive(message);
  archive(value);
  archive.seal();
  return body_of(message);
}

template <class T>
static void read_into(T& value, Bytes body) {
  rpc::InMessage message = message_with(rpc::wire::kRequest, body);
  rpc::InArchive archive(message, message.view.body());
  archive(value);
  archive.check_seal();
  archive.expect_end();
}

// What was read can be written, and read again.
template <class T>
static void read_one(Bytes body) {
  T value{};
  read_into(value, body);
  const base::Bytes once = written(value);
  T again{};
  read_into(again, once.span());
  require(written(again).size() == once.size(), "a value, written again");
}

using Reader = void (*)(Bytes);
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
};

// The input: which type, then the body of a message that should be one.
static bool run(Bytes input) {
  Choices choices(input);
  const Reader read = kReaders[choices.byte() % std::size(kReaders)];
  try {
    read(choices.rest());
    return true;
  } catch (const Error& error) {
    require_code(error, {ErrorCode::protocol, ErrorCode::invalid_argument});
  } catch (const cereal::Exception&) {
    // The form of a bitset: cereal reads it.
  } catch (const std::invalid_argument&) {
    // Likewise the digits of a bitset.
  }
  return false;
}

template <class T>
static base::Bytes seed_of(std::uint8_t index, const T& value) {
  return seed_for(index, written(value).span());
}

static Seeds seeds() {
  Seeds list;
  Record record;
  record.name = "name";
  record.points = {{1, 2.0}, {3, 4.0}};
  record.table = {{"one", {1}}, {"two", {1, 2}}};
  record.choice = std::vector<bool>{true, false, true};
  list.push_back({"record", seed_of(0, record)});
  list.push_back(
      {"vectors", seed_of(1, std::vector<std::vector<std::string>>{{"a", "b"}, {}, {"c"}})});
  list.push_back({"map", seed_of(2, std::map<std::string, std::list<std::optional<float>>>{
                                        {"a", {1.0F, std::nullopt}}, {"b", {}}})});
  list.push_back({"set", seed_of(3, std::set<char>{'a', 'b'})});
  list.push_back(
      {"unordered-map",
       seed_of(4, std::unordered_map<std::uint32_t, std::deque<std::tuple<int, char, double>>>{
                      {7, {{1, 'x', 2.0}}}})});
  Chain chain;
  chain.next = std::make_unique<Chain>();
  chain.next->next = std::make_unique<Chain>();
  list.push_back({"chain", seed_of(5, chain)});
  list.push_back({"empty", seed_of(6, std::vector<Empty>(5))});
  std::vector<std::unique_ptr<std::array<std::uint64_t, 8>>> pointers(2);
  pointers[1] = std::make_unique<std::array<std::uint64_t, 8>>();
  list.push_back({"pointers", seed_of(7, pointers)});
  using Choice = std::variant<std::bitset<70>, std::complex<double>, std::chrono::nanoseconds>;
  list.push_back({"bitset", seed_of(8, Choice(std::bitset<70>(5)))});
  list.push_back({"duration", seed_of(8, Choice(std::chrono::nanoseconds(5)))});
  list.push_back(
      {"error",
       seed_of(
           9,
           Error(ErrorCode::timeout, "it took too long").with_worker("ps0").with_function("add"))});
  list.push_back({"bools", seed_of(10, std::vector<bool>{true, false})});
  list.push_back(
      {"multimap",
       seed_of(11, std::multimap<std::string, std::variant<std::string, std::vector<float>>>{
                       {"a", "text"}, {"a", std::vector<float>{1, 2}}})});
  return list;
}

}  // namespace stitch::fuzz::archives

namespace stitch::fuzz {
// Values are read and written twice, within what archives may take.
const Target archive{"archive", archives::run, archives::seeds,
                     rpc::kMaxElementMemoryForEachByte * 4,
                     2 * rpc::kMaxElementMemoryInAnyCase + (std::size_t{8} << 20)};
}  // namespace stitch::fuzz
