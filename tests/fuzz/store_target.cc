#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/store_service.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::stores {

using transport::StoreOperation;
using transport::StoreReply;
using transport::StoreRequest;

constexpr std::size_t kMaxStoreBytes = std::size_t{1} << 20;
constexpr std::string_view kFileHeader{"stitch store 3\n\0\7\0\0\0\0\0\0\0", 24};

enum Decoder : std::uint8_t {
  kRequests,  // of several clients of a server: for each its client, its length, the frame
  kReply,     // what a client gets
  kClaims,    // the file of a file store, which has the claims
  kValues,    // and that of its values
  kDecoders
};

static transport::Message message_of(Bytes frame) { return {copy_of(frame), {}}; }

static bool run_reply(Bytes bytes) {
  return accepts([&] {
    const StoreReply reply = transport::decode_store_reply(message_of(bytes));
    if (reply.error && reply.value) require_printable(*reply.value, "a text of a server");
    const StoreReply again = transport::decode_store_reply(encode(reply));
    require(transport::texts_of(again.entries) == transport::texts_of(reply.entries) &&
                again.count == reply.count && again.error == reply.error &&
                !again.value == !reply.value && (!reply.value || *again.value == *reply.value),
            "a reply, written again");
  });
}

static bool run_requests(Choices choices) {
  transport::StoreService service(kMaxStoreBytes);
  while (!choices.empty()) {
    const unsigned client = choices.byte() % 4;
    const Bytes frame = choices.take(choices.word());
    if (frame.empty()) {
      service.forget(client);
      continue;
    }
    StoreRequest request;
    if (!accepts([&] { request = transport::decode_store_request(message_of(frame)); }))
      return false;
    for (const auto& [to, reply] : service.serve(client, request)) {
      require(to < 4, "a reply to an unknown client");
      const transport::Message sent = encode(reply);
      require(run_reply(sent.frame.span()) || !sent.buffers.empty(), "a reply of a server");
    }
  }
  return true;
}

// A file of this process, with these bytes.
static std::string file_with(Bytes bytes, const std::string& suffix = {}) {
  static const std::string kPath =
      (std::filesystem::temp_directory_path() / ("stitch-fuzz-store-" + std::to_string(::getpid())))
          .string();
  std::filesystem::remove(kPath + suffix);
  const base::Descriptor file(
      ::open((kPath + suffix).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  require(::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "a file cannot be written");
  return kPath;
}

static bool run_file(const std::string& path) {
  const bool accepted = accepts({ErrorCode::protocol, ErrorCode::invalid_argument}, [&] {
    const auto store = transport::make_file_store(path);
    require(store->claims("", 1, {}).empty(), "a claim that has no process");
    const auto claimed = store->claim("key", "value");
    require(claimed.claim != nullptr && store->claims("", 1, {}).size() == 1, "a claim is lost");
    const auto value = store->try_get("key");
    store->set("other", "value");
    // The next one reads what this one has read, and what it has written.
    const auto next = transport::make_file_store(path);
    require(next->try_get("key") == value && next->get("other", {}) == "value" &&
                next->claims("k", 1, {}) == store->claims("k", 1, {}),
            "a file store reads something else when it is opened again");
  });
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".values");
  return accepted;
}

static bool run(Bytes input) {
  Choices choices(input);
  switch (static_cast<Decoder>(choices.byte() % kDecoders)) {
    case kRequests:
      return run_requests(choices);
    case kReply:
      return run_reply(choices.rest());
    case kClaims:
      return run_file(file_with(choices.rest()));
    default:
      file_with(choices.rest(), ".values");
      return run_file(file_with(std::as_bytes(std::span(kFileHeader))));
  }
}

static void add_requests(Seeds& list) {
  base::Bytes all;
  base::ByteWriter out(all);
  std::uint64_t number = 0;
  const auto add = [&](std::uint8_t client, StoreRequest request) {
    request.number = ++number;
    const transport::Message message = encode(request);
    out.write(client);
    out.write(static_cast<std::uint16_t>(message.frame.size()));
    out.write_bytes(message.frame.span());
  };
  add(0, {.operation = StoreOperation::get, .key = "key"});
  add(0, {.operation = StoreOperation::claims, .key = "member/", .count = 1});
  add(1, {.operation = StoreOperation::set, .key = "key", .value = "value"});
  add(1, {.operation = StoreOperation::try_get, .key = "key"});
  add(2, {.operation = StoreOperation::claim, .key = "member/2", .value = "card"});
  add(1, {.operation = StoreOperation::claim, .key = "member/2", .value = "card"});
  add(2, {.operation = StoreOperation::release, .key = "member/2"});
  add(1, {.operation = StoreOperation::erase, .key = "key"});
  add(3, {.operation = StoreOperation::get, .key = "never"});
  add(3, {.operation = StoreOperation::stop_waiting, .count = static_cast<std::int64_t>(number)});
  list.push_back({"requests", seed_for(kRequests, all.span())});
}

static Seeds seeds() {
  Seeds list;
  add_requests(list);
  StoreReply reply{.number = 7, .count = 1};
  for (const char* key : {"member/1", "member/2"})
    reply.entries.emplace(key, std::make_shared<const std::string>("card"));
  list.push_back({"reply-claims", seed_for(kReply, encode(reply).frame.span())});
  reply.entries.clear();
  reply.value = std::make_shared<const std::string>("a value");
  list.push_back({"reply-value", seed_for(kReply, encode(reply).frame.span())});
  reply.error = ErrorCode::overloaded;
  list.push_back({"reply-error", seed_for(kReply, encode(reply).frame.span())});

  base::Bytes claims;
  base::ByteWriter out(claims);
  out.write_bytes(std::as_bytes(std::span(kFileHeader)));
  for (const std::string& key : {std::string("member/1"), std::string("key")}) {
    out.write(std::uint32_t{64});
    out.write(static_cast<std::uint32_t>(key.size()));
    out.write(static_cast<std::uint32_t>(64 - key.size()));
    const std::string both = key + std::string(64 - key.size(), 'v');
    out.write_bytes(std::as_bytes(std::span(both)));
  }
  list.push_back({"claims", seed_for(kClaims, claims.span())});
  base::Bytes values;
  base::ByteWriter to(values);
  to.write_bytes(std::as_bytes(std::span(std::string_view("stitch values 1\n"))));
  to.write(std::uint64_t{7});
  to.write(std::uint32_t{1});
  to.write_string("key");
  to.write_string("value");
  list.push_back({"values", seed_for(kValues, values.span())});
  return list;
}

}  // namespace stitch::fuzz::stores

namespace stitch::fuzz {
// A server's memory is within its limits.
const Target store{"store", stores::run, stores::seeds, 256, std::size_t{8} << 20};
}  // namespace stitch::fuzz
