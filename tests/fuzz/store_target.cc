#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/base/event_loop.h"
#include "stitch/transport/store/file_log.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/store_handshake.h"
#include "stitch/transport/store/store_requests.h"
#include "stitch/transport/store/store_session.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::stores {

using transport::StoreHandshake;
using transport::StoreOperation;

constexpr std::string_view kMagic = "stitchKV";
constexpr std::size_t kMaxStoreBytes = std::size_t{1} << 20;

enum Decoder : std::uint8_t {
  kClient,   // requests of a client that has introduced itself properly
  kStream,   // all that arrives at a server
  kFile,     // the file of a file store
  kRecords,  // the records of one, each behind its length, with right checksums
  kReply,    // what a client gets: the status of a reply
  kAnswer,   // and the answer in a handshake
  kDecoders
};

// A server of one client, over a pair of sockets.
class Server final : public transport::StoreSessionOwner,
                     public std::enable_shared_from_this<Server> {
 public:
  explicit Server(base::EventLoop& loop)
      : loop_(loop),
        frame_budget_(std::make_shared<transport::ByteBudget>(kMaxStoreBytes)),
        requests_(std::make_shared<transport::StoreRequests>(loop, kMaxStoreBytes)) {}

  // On the loop's thread. Owns the socket.
  void serve(int socket) {
    auto stream = transport::FramedStream::create(loop_.raw());
    require(uv_tcp_open(stream->tcp(), socket) == 0, "a socket cannot be opened");
    std::make_shared<transport::StoreSession>(shared_from_this(), loop_, options_, frame_budget_,
                                              stream, 1)
        ->start();
  }
  void check_room() const override {}
  void on_open(transport::StoreSession&) override {}
  void on_request(const std::shared_ptr<transport::StoreSession>& session, Bytes frame) override {
    requests_->perform(session, frame);
  }
  void on_closed(transport::StoreSession& session) override { requests_->forget(session); }

 private:
  base::EventLoop& loop_;
  const transport::TcpStoreOptions options_{};
  const std::shared_ptr<transport::ByteBudget> frame_budget_;
  const std::shared_ptr<transport::StoreRequests> requests_;
};

static void send_all(int socket, Bytes bytes) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

static base::Bytes framed(const base::Bytes& content) {
  base::Bytes frame;
  base::ByteWriter out(frame);
  out.write(static_cast<std::uint32_t>(content.size()));
  out.write_bytes(content.span());
  return frame;
}

// Accepted: the server answers more than the introduction.
static bool run_server(bool introduced, Bytes bytes) {
  static base::EventLoop loop("fuzz-store");
  static const base::Bytes kIntroduction =
      framed(StoreHandshake(StoreHandshake::Role::client, "", nullptr).hello());
  std::array<int, 2> ends{};
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0, "no sockets");
  const base::Descriptor socket(ends[0]);
  loop.post([end = ends[1]] { std::make_shared<Server>(loop)->serve(end); });
  if (introduced) {
    send_all(socket.get(), std::as_bytes(std::span(kMagic)));
    send_all(socket.get(), kIntroduction.span());
  }
  send_all(socket.get(), bytes);
  ::shutdown(socket.get(), SHUT_WR);
  std::array<char, 4096> answer;
  std::size_t received = 0;
  for (;;) {
    const auto got = ::recv(socket.get(), answer.data(), answer.size(), 0);
    if (got <= 0) break;
    received += static_cast<std::size_t>(got);
  }
  return received > kMagic.size() + 4 + StoreHandshake::kAnswerBytes;
}

// A file of this process, with these bytes.
static std::string file_with(Bytes bytes) {
  static const std::string kPath =
      (std::filesystem::temp_directory_path() / ("stitch-fuzz-store-" + std::to_string(::getpid())))
          .string();
  std::filesystem::remove(kPath);
  const base::Descriptor file(
      ::open(kPath.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  require(::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "a file cannot be written");
  return kPath;
}

static bool run_file(const std::string& path) {
  const bool accepted = accepts({ErrorCode::protocol, ErrorCode::invalid_argument}, [&] {
    const auto store = transport::make_file_store(path);
    const auto value = store->try_get("key");
    store->set("other", "value");
    // The next one reads what this one has read, and what it has written.
    const auto next = transport::make_file_store(path);
    require(next->try_get("key") == value && next->get("other", {}) == "value",
            "a file store reads something else when it is opened again");
  });
  std::filesystem::remove(path);
  return accepted;
}

static bool run_records(Choices choices) {
  const std::string path = file_with({});
  {
    transport::FileLog log(path, [](std::string_view) {});
    while (!choices.empty()) {
      const Bytes payload = choices.take(choices.word());
      transport::FileLog::Writer(log).append(text_of(payload));
    }
  }
  return run_file(path);
}

static bool run_status(Bytes bytes) {
  try {
    const Bytes result = transport::decode_status(bytes);
    const auto again = transport::encode_accepted(copy_of(result));
    require(same(again.span(), bytes), "a reply, written again");
    return true;
  } catch (const Error& error) {
    require_printable(error.what(), "a text of a server");
    return false;
  }
}

static bool run_answer(Bytes bytes) {
  try {
    touch(transport::decode_answer(bytes, StoreHandshake::kHelloBytes));
    return true;
  } catch (const Error& error) {
    require_printable(error.what(), "a text of a server");
    return false;
  }
}

static bool run(Bytes input) {
  Choices choices(input);
  const auto decoder = static_cast<Decoder>(choices.byte() % kDecoders);
  switch (decoder) {
    case kClient:
    case kStream:
      return run_server(decoder == kClient, choices.rest());
    case kFile:
      return run_file(file_with(choices.rest()));
    case kRecords:
      return run_records(choices);
    case kReply:
      return run_status(choices.rest());
    default:
      return run_answer(choices.rest());
  }
}

using Writer = base::ByteWriter;

static base::Bytes request(StoreOperation operation,
                           const std::function<void(Writer&)>& write_arguments) {
  base::Bytes content;
  Writer arguments(content);
  arguments.write(std::uint64_t{1});
  arguments.write(operation);
  write_arguments(arguments);
  return framed(content);
}

static void add_requests(Seeds& list) {
  base::Bytes all;
  const auto add = [&](const char* name, const base::Bytes& bytes) {
    all.append(bytes.data(), bytes.size());
    list.push_back({std::string("client-") + name, seed_for(kClient, bytes.span())});
  };
  add("set", request(StoreOperation::set, [](Writer& to) {
        to.write_string("key");
        to.write_string("value");
      }));
  add("try-get", request(StoreOperation::try_get, [](Writer& to) { to.write_string("key"); }));
  add("add", request(StoreOperation::add, [](Writer& to) {
        to.write_string("count");
        to.write(std::int64_t{2});
      }));
  add("compare", request(StoreOperation::compare_and_set, [](Writer& to) {
        to.write_string("key");
        to.write(std::uint8_t{1});
        to.write_string("value");
        to.write_string("other");
      }));
  add("erase", request(StoreOperation::erase, [](Writer& to) { to.write_string("key"); }));
  // Requests that wait are answered only after the others have made their keys.
  const base::Bytes wait = request(StoreOperation::wait, [](Writer& to) {
    to.write(std::uint32_t{1});
    to.write_string("count");
    to.write(std::int64_t{10});
  });
  const base::Bytes get = request(StoreOperation::get, [](Writer& to) {
    to.write_string("count");
    to.write(std::int64_t{10});
  });
  all.append(wait.data(), wait.size());
  all.append(get.data(), get.size());
  list.push_back({"client-all", seed_for(kClient, all.span())});
  base::Bytes stream = bytes_of(kMagic);
  const base::Bytes hello =
      framed(StoreHandshake(StoreHandshake::Role::client, "", nullptr).hello());
  stream.append(hello.data(), hello.size());
  stream.append(all.data(), all.size());
  list.push_back({"stream", seed_for(kStream, stream.span())});
}

static void add_files(Seeds& list) {
  const std::string path = file_with({});
  {
    const auto store = transport::make_file_store(path);
    store->set("key", "value");
    store->add("count", 3);
    store->erase("key");
    store->set("key", "another");
  }
  base::Bytes file(static_cast<std::size_t>(std::filesystem::file_size(path)));
  const base::Descriptor in(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  require(::read(in.get(), file.data(), file.size()) == static_cast<ssize_t>(file.size()),
          "a file cannot be read");
  list.push_back({"file", seed_for(kFile, file.span())});
  // The same, as it is when it was written anew.
  base::Bytes rewritten = bytes_of(std::string_view("stitch store 2\n\0the line of file", 32));
  rewritten.append(file.data() + 16, file.size() - 16);
  list.push_back({"file-rewritten", seed_for(kFile, rewritten.span())});
  base::Bytes records;
  Writer out(records);
  for (const std::string_view payload :
       {std::string_view("\1\3\0\0\0keyvalue", 13), std::string_view("\2\3\0\0\0key", 8)}) {
    out.write(static_cast<std::uint16_t>(payload.size()));
    records.append(payload.data(), payload.size());
  }
  list.push_back({"records", seed_for(kRecords, records.span())});
  std::filesystem::remove(path);
}

static Seeds seeds() {
  Seeds list;
  add_requests(list);
  add_files(list);
  list.push_back(
      {"reply", seed_for(kReply, transport::encode_accepted(bytes_of("a result")).span())});
  const StoreHandshake server(StoreHandshake::Role::server, "", nullptr);
  list.push_back(
      {"answer", seed_for(kAnswer, transport::encode_answer(server.hello().span()).span())});
  return list;
}

}  // namespace stitch::fuzz::stores

namespace stitch::fuzz {
// A server's memory is within its limits, and a connection has buffers of 64 KiB.
const Target store{"store", stores::run, stores::seeds, 256, std::size_t{8} << 20};
}  // namespace stitch::fuzz
