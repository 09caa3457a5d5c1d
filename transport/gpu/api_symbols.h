#pragma once

// The members of CudaApi and NcclApi with the names that CUDA and NCCL give these functions, for
// those that go over all of them: X(member, symbol).

#define STITCH_CUDA_RUNTIME_FUNCTIONS(X)                                      \
  X(get_device_count, cudaGetDeviceCount)                                     \
  X(set_device, cudaSetDevice)                                                \
  X(runtime_get_version, cudaRuntimeGetVersion)                               \
  X(device_get_stream_priority_range, cudaDeviceGetStreamPriorityRange)       \
  X(malloc, cudaMalloc)                                                       \
  X(free, cudaFree)                                                           \
  X(host_alloc, cudaHostAlloc)                                                \
  X(free_host, cudaFreeHost)                                                  \
  X(memcpy_async, cudaMemcpyAsync)                                            \
  X(memcpy_peer_async, cudaMemcpyPeerAsync)                                   \
  X(memset_async, cudaMemsetAsync)                                            \
  X(stream_create_with_priority, cudaStreamCreateWithPriority)                \
  X(stream_destroy, cudaStreamDestroy)                                        \
  X(stream_query, cudaStreamQuery)                                            \
  X(stream_synchronize, cudaStreamSynchronize)                                \
  X(stream_is_capturing, cudaStreamIsCapturing)                               \
  X(thread_exchange_stream_capture_mode, cudaThreadExchangeStreamCaptureMode) \
  X(event_create_with_flags, cudaEventCreateWithFlags)                        \
  X(event_destroy, cudaEventDestroy)                                          \
  X(event_record, cudaEventRecord)                                            \
  X(event_query, cudaEventQuery)                                              \
  X(device_can_access_peer, cudaDeviceCanAccessPeer)                          \
  X(device_enable_peer_access, cudaDeviceEnablePeerAccess)                    \
  X(get_last_error, cudaGetLastError)                                         \
  X(get_error_name, cudaGetErrorName)                                         \
  X(get_error_string, cudaGetErrorString)

// The second version tells the parts of a divided GPU (MIG) apart.
#define STITCH_CUDA_DRIVER_FUNCTIONS(X) X(device_get_uuid, cuDeviceGetUuid_v2)

#define STITCH_NCCL_FUNCTIONS(X)                   \
  X(get_version, ncclGetVersion)                   \
  X(get_unique_id, ncclGetUniqueId)                \
  X(comm_init_rank_config, ncclCommInitRankConfig) \
  X(comm_get_async_error, ncclCommGetAsyncError)   \
  X(comm_abort, ncclCommAbort)                     \
  X(send, ncclSend)                                \
  X(recv, ncclRecv)                                \
  X(group_start, ncclGroupStart)                   \
  X(group_end, ncclGroupEnd)                       \
  X(get_error_string, ncclGetErrorString)          \
  X(get_last_error, ncclGetLastError)
