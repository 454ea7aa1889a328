/**
 * Decodes messages of `application/vnd.amazon.eventstream` from arriving bytes.
 *
 * Source: https://smithy.io/2.0/aws/amazon-eventstream.html
 *
 *     bytes   what
 *     4       length of the whole message, big endian
 *     4       length of the headers
 *     4       CRC-32 of these eight bytes
 *     …       headers: length of the name (1), name, type 7 (text), length of the value (2), value
 *     …       payload: JSON
 *     4       CRC-32 of everything before
 *
 * The decoder's only state is the bytes of a message that has not arrived completely.
 */

const PRELUDE = 12
const TRAILER = 4
const TEXT = 7
/** Largest message that AWS allows. A larger length shows that the bytes are damaged. */
const MOST_BYTES = 24 * 1024 * 1024

export interface Message {
  type: string
  payload: string
}

/** The bytes are not a valid message. The reader must open a new stream. */
export class BrokenStream extends Error {}

const TABLE = Uint32Array.from({ length: 256 }, (_, index) => {
  let value = index
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1
  return value
})

export function crc32(bytes: Uint8Array): number {
  let value = 0xffffffff
  for (const byte of bytes) value = TABLE[(value ^ byte) & 0xff]! ^ (value >>> 8)
  return (value ^ 0xffffffff) >>> 0
}

export class EventStreamDecoder {
  private held = new Uint8Array()
  private readonly text = new TextDecoder()

  /** Add received bytes, and return the messages that they complete. */
  push(bytes: Uint8Array): Message[] {
    const joined = new Uint8Array(this.held.length + bytes.length)
    joined.set(this.held)
    joined.set(bytes, this.held.length)
    const messages: Message[] = []
    let at = 0
    while (joined.length - at >= PRELUDE) {
      const view = new DataView(joined.buffer, at)
      const length = view.getUint32(0)
      const headers = view.getUint32(4)
      const isPossible = length <= MOST_BYTES && length >= PRELUDE + headers + TRAILER
      if (!isPossible || crc32(joined.subarray(at, at + 8)) !== view.getUint32(8)) {
        throw new BrokenStream('the beginning of a message is damaged')
      }
      if (joined.length - at < length) break
      const whole = joined.subarray(at, at + length)
      if (crc32(whole.subarray(0, length - TRAILER)) !== view.getUint32(length - TRAILER)) {
        throw new BrokenStream('a message is damaged')
      }
      messages.push({
        type: this.header(whole.subarray(PRELUDE, PRELUDE + headers), ':event-type'),
        payload: this.text.decode(whole.subarray(PRELUDE + headers, length - TRAILER)),
      })
      at += length
    }
    this.held = joined.slice(at)
    return messages
  }

  private header(bytes: Uint8Array, wanted: string): string {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length)
    for (let at = 0; at + 4 <= bytes.length;) {
      const name = this.text.decode(bytes.subarray(at + 1, at + 1 + view.getUint8(at)))
      at += 1 + view.getUint8(at)
      if (view.getUint8(at) !== TEXT) throw new BrokenStream('a header is not text')
      const length = view.getUint16(at + 1)
      if (name === wanted) return this.text.decode(bytes.subarray(at + 3, at + 3 + length))
      at += 3 + length
    }
    return ''
  }
}
