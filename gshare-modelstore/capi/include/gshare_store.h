/* The model store's client. Made of src/lib.rs by cbindgen: change that.
 *
 * A function that can fail takes a buffer for an error text (may be NULL). Nothing here is thread-safe on the same object, except
 * gshare_model_release of different models. Text is UTF-8. */

#ifndef GSHARE_STORE_H
#define GSHARE_STORE_H

#include <stddef.h>
#include <stdint.h>

/*
 Memory of the GPU.
 */
#define GSHARE_TIER_GPU 0

/*
 Host memory.
 */
#define GSHARE_TIER_HOST 1

/*
 Only the owner may read.
 */
#define GSHARE_ACCESS_PRIVATE 0

/*
 The owner's group may read.
 */
#define GSHARE_ACCESS_GROUP 1

/*
 Everybody may read.
 */
#define GSHARE_ACCESS_PUBLIC 2

/*
 The store is gone. Codes below 100 come from the store, these codes from the client.
 */
#define GSHARE_ERROR_GONE 100

/*
 An argument is invalid.
 */
#define GSHARE_ERROR_ARGUMENT 101

/*
 The system refused an operation, or the store speaks another protocol.
 */
#define GSHARE_ERROR_SYSTEM 102

/*
 A reference to a model.
 */
typedef struct gshare_model gshare_model;

/*
 A connection to a store.
 */
typedef struct gshare_store gshare_store;

/*
 A tensor of a model. Pointers are valid until the model is released; no process can write to `data`.
 */
typedef struct gshare_tensor {
  /*
   Name in UTF-8, without a terminating 0.
   */
  const char *name;
  /*
   Length of the name in bytes.
   */
  uint64_t name_bytes;
  /*
   Dimensions of the tensor.
   */
  const uint64_t *shape;
  /*
   Number of dimensions.
   */
  uint64_t rank;
  /*
   The tensor's data; NULL if the model is not in host memory.
   */
  const uint8_t *data;
  /*
   Offset of the data in the arena.
   */
  uint64_t offset;
  /*
   Bytes of the tensor's data.
   */
  uint64_t bytes;
  /*
   BLAKE3 of the data.
   */
  uint8_t hash[32];
  /*
   0 BOOL, 1 U8, 2 I8, 3 `F8_E5M2`, 4 `F8_E4M3`, 5 `F8_E8M0`, 6 I16, 7 U16, 8 F16, 9 BF16, 10 I32, 11 U32, 12 F32, 13 C64, 14 F64,
   15 I64, 16 U64, 17 F4, 18 `F6_E2M3`, 19 `F6_E3M2`, 20 any other.
   */
  uint8_t dtype;
} gshare_tensor;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Connects to the store at a path. NULL, with the reason in `error`, if that fails.

 # Safety
 `path` ends with a 0; `error` is null or has `error_bytes` bytes.
 */
struct gshare_store *gshare_store_connect(const char *path, char *error, size_t error_bytes);

/*
 Closes a connection; models from it stay valid.

 # Safety
 `store` is null or came from `gshare_store_connect`, and is not used again.
 */
void gshare_store_close(struct gshare_store *store);

/*
 Takes a reference to a model in a tier, and loads it if necessary; `gshare_model_release` gives the reference back.
 NULL, with the reason in `error`, if the store refuses. The model outlives the connection and the store, and is mapped
 at the first access to its tensors.

 # Safety
 `store` came from `gshare_store_connect`; `name` ends with a 0; `error` is null or has `error_bytes` bytes.
 */
struct gshare_model *gshare_store_get(struct gshare_store *store,
                                      const char *name,
                                      uint32_t tier,
                                      uint32_t timeout_ms,
                                      char *error,
                                      size_t error_bytes);

/*
 Gives a model's reference back.

 # Safety
 `model` is null or came from `gshare_store_get`; neither the model nor its data is used again.
 */
void gshare_model_release(struct gshare_model *model);

/*
 Loads a safetensors file from `descriptor`, which stays open for the caller. 0, or a code.

 # Safety
 As `gshare_store_get`; `descriptor` is open.
 */
int32_t gshare_store_put_file(struct gshare_store *store,
                              const char *name,
                              int32_t descriptor,
                              uint32_t access_number,
                              char *error,
                              size_t error_bytes);

/*
 Stores tensors from memory, by name, shape, data, bytes and dtype of each. 0, or a code.

 # Safety
 As `gshare_store_get`; `tensors` has `count` elements, each with a name, a shape and data of the stated lengths.
 */
int32_t gshare_store_put(struct gshare_store *store,
                         const char *name,
                         uint32_t access_number,
                         const struct gshare_tensor *tensors,
                         size_t count,
                         char *error,
                         size_t error_bytes);

/*
 Evicts a model from memory; with `forget`, its name becomes free. 0, or a code.

 # Safety
 As `gshare_store_get`.
 */
int32_t gshare_store_evict(struct gshare_store *store,
                           const char *name,
                           int32_t forget,
                           char *error,
                           size_t error_bytes);

/*
 The bytes of all arenas in a tier, exact to the byte, for comparison with other books. 0, or a code.

 # Safety
 `store` came from `gshare_store_connect`; `bytes` has room for one number; `error` is null or has `error_bytes` bytes.
 */
int32_t gshare_store_arena_bytes(struct gshare_store *store,
                                 uint32_t tier,
                                 uint64_t *bytes,
                                 char *error,
                                 size_t error_bytes);

/*
 Maps a model, as the first access to a tensor does, after a check that no process can write to it or truncate it. 0, or
 a code, with the reason in `error`, if the store's files are invalid or the system refuses the map.

 # Safety
 `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
 */
int32_t gshare_model_open(const struct gshare_model *model,
                          char *error,
                          size_t error_bytes);

/*
 Number of tensors; 0 if the model cannot be mapped, for the reason that `gshare_model_open` gives.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
uint64_t gshare_model_tensors(const struct gshare_model *model);

/*
 The tensor at a position, in the order of the names. 0, or `GSHARE_ERROR_ARGUMENT` beyond the last tensor, or
 `GSHARE_ERROR_SYSTEM` if the model cannot be mapped.

 # Safety
 `model` is null or came from `gshare_store_get`; `tensor` has room for one tensor.
 */
int32_t gshare_model_tensor(const struct gshare_model *model, uint64_t at, struct gshare_tensor *tensor);

/*
 Bytes of the arena.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
uint64_t gshare_model_bytes(const struct gshare_model *model);

/*
 The content hash of the model: 32 bytes.

 # Safety
 `model` came from `gshare_store_get`; `content` has 32 bytes.
 */
void gshare_model_content(const struct gshare_model *model, uint8_t *content);

/*
 The descriptor of the arena, or -1; it belongs to the model.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
int32_t gshare_model_descriptor(const struct gshare_model *model);

/*
 Maps a model of the GPU tier for reading, into the primary context of a device of this process, and gives the address of
 its arena there. A tensor is at this address plus its offset. The map stays until the model is released, and further
 calls give the same address. 0, with the reason in `error`, if the model is not in GPU memory or the driver refuses.

 # Safety
 `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
 */
uint64_t gshare_model_map(struct gshare_model *model,
                          uint32_t device,
                          char *error,
                          size_t error_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GSHARE_STORE_H */
