#pragma once

namespace stitch::transport {

// Moves this thread to another CPU of those it may use; its affinity mask is the same afterwards.
// False when there is no other CPU, or the system refuses. Thread contract: any thread.
//
// Why a thread would: when two threads that wait for each other by polling share a CPU, each of
// them runs only while the other one yields. Linux places a woken thread beside the one that woke
// it, looks for an idle CPU only where it expects to find one soon (the SIS_UTIL heuristic of its
// scheduler, which with two CPUs hardly ever looks), and does not migrate threads that run often.
// Such threads then stay together while another CPU is idle, and a round trip takes ten times as
// long.
bool migrate_to_other_cpu() noexcept;

}  // namespace stitch::transport
