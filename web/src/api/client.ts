/** Calls the API: typed functions for all operations of the contract. The session's cookie authenticates the caller. */
import { operations, type ErrorResponse, type FieldError, type Operations } from '../contract'

export type Operation = keyof Operations

/** The error of a request that the server refused or did not answer. `status` is 0 if no answer arrived. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly requestId = '',
    readonly hint = '',
    readonly fields: FieldError[] = [],
  ) {
    super(message)
  }

  /** Whether the same request may succeed later. */
  get isPassing(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500
  }
}

export interface Session {
  Role: string
  Project: string
  TokenId: string
  Description: string
  ExpiresAt: number
  Version: string
  Time: number
}

const TIMEOUT_MS = 20_000

/**
 * Contact with the server. `at`: time in milliseconds, by this browser's clock, of its last answer or refusal.
 *
 * `isMissed`: whether the newest request had no answer. `signedOut` is called when the server refuses the session.
 */
export const contact = { at: Date.now(), isMissed: false, signedOut: () => {} }

/** Seconds by which the server's clock is ahead of this browser's. Pages count ages by the server's clock. */
export const clock = { offset: 0 }

/** The server's time, in Unix seconds. */
export const serverTime = (browserMs = Date.now()): number => browserMs / 1000 + clock.offset

/** Smallest clock difference in seconds that `clock` corrects. The delay of an answer can cause smaller differences. */
const CLOCK_SECONDS = 1.5

function heard(session: Session): Session {
  const ahead = session.Time - Date.now() / 1000
  if (Math.abs(ahead - clock.offset) > CLOCK_SECONDS) clock.offset = Math.abs(ahead) > CLOCK_SECONDS ? ahead : 0
  return session
}

interface Sending {
  body?: unknown
  signal?: AbortSignal
  /** ETag of the stored response to this request. The server then sends a body only if the response has changed. */
  tag?: string
}

async function send(method: string, url: string, { body, signal, tag }: Sending = {}): Promise<Response> {
  const limit = AbortSignal.timeout(TIMEOUT_MS)
  let response: Response
  try {
    response = await fetch(url, {
      method,
      headers: {
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
        ...(tag === undefined ? {} : { 'if-none-match': tag }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      credentials: 'same-origin',
    })
  } catch (error) {
    if (signal?.aborted) throw error
    const why = limit.aborted ? `no answer within ${TIMEOUT_MS / 1000} s` : 'no connection'
    contact.isMissed = true
    const hint = 'Is the server running, and this machine online?'
    throw new ApiError(0, 'NoAnswer', `The control plane does not answer: ${why}.`, '', hint)
  }
  contact.isMissed = response.status >= 500 // a 5xx response contains no data, so the page is stale
  if (!contact.isMissed) contact.at = Date.now()
  if (response.status === 401) contact.signedOut()
  if (!response.ok && response.status !== 304) throw await refusal(response)
  return response
}

/** The newest responses to GET requests, by URL. The server sends 304 without a body for an equal response. */
const answers = new Map<string, { tag: string; value: unknown }>()
const MAX_ANSWERS = 60

async function get(url: string, signal?: AbortSignal): Promise<unknown> {
  const held = answers.get(url)
  const response = await send('GET', url, { signal, tag: held?.tag })
  const tag = response.headers.get('etag')
  const value: unknown = response.status === 304 && held ? held.value : await response.json()
  answers.delete(url) // `set` adds the entry at the end, so that the least recently used entries come first.
  if (tag !== null) answers.set(url, { tag, value })
  for (const oldest of answers.keys()) {
    if (answers.size <= MAX_ANSWERS) break
    answers.delete(oldest)
  }
  return value
}

async function refusal(response: Response): Promise<ApiError> {
  const requestId = response.headers.get('x-amzn-requestid') ?? ''
  const said = (await response.json().catch(() => ({}))) as Partial<ErrorResponse>
  const message = said.Message ?? `The server answered ${response.status} ${response.statusText}.`
  const code = said.Code ?? `HTTP ${response.status}`
  const id = said.RequestId || requestId
  return new ApiError(response.status, code, message, id, said.Hint ?? '', said.Fields ?? [])
}

/** Return the URL of an operation with its path and query parameters, and the other fields as the request's body. */
export function address<O extends Operation>(
  operation: O,
  request: Operations[O]['request'],
): { url: string; body?: Record<string, unknown> } {
  const { method, path, query } = operations[operation] as { method: string; path: string; query: readonly string[] }
  const rest: Record<string, unknown> = { ...request }
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = String(rest[name])
    delete rest[name]
    return encodeURIComponent(value)
  })
  const search = new URLSearchParams()
  for (const name of query) {
    if (rest[name] !== undefined && rest[name] !== '') search.set(name, String(rest[name]))
    delete rest[name]
  }
  const url = search.size ? `${filled}?${search}` : filled
  return method === 'GET' || method === 'DELETE' ? { url } : { url, body: rest }
}

/** Call an operation, and return its JSON response. */
export async function call<O extends Operation>(
  operation: O,
  request: Operations[O]['request'],
  signal?: AbortSignal,
): Promise<Operations[O]['response']> {
  const { url, body } = address(operation, request)
  const { method } = operations[operation]
  if (method === 'GET') return (await get(url, signal)) as Operations[O]['response']
  const response = await send(method, url, { body, signal })
  return (await response.json()) as Operations[O]['response']
}

/** Return the items of all pages of a list. After `limit` items, no further page is requested. */
export async function all<T>(
  page: (token?: string) => Promise<{ items: T[]; next?: string }>,
  limit = 5_000,
): Promise<T[]> {
  const items: T[] = []
  let next: string | undefined
  do {
    const answer = await page(next)
    items.push(...answer.items)
    next = answer.next
  } while (next !== undefined && items.length < limit)
  return items
}

/**
 * Milliseconds without data after which a streaming response counts as broken.
 *
 * If a log has no new lines, the server sends an empty message about every 10 s.
 */
const SILENCE_MS = 30_000

/** Yield the bytes of a streaming response as they arrive. Throws if it breaks or is silent for `SILENCE_MS`. */
export async function* open(url: string, signal: AbortSignal): AsyncGenerator<Uint8Array> {
  const silence = new AbortController()
  const either = AbortSignal.any([signal, silence.signal])
  let timer = setTimeout(() => silence.abort(), SILENCE_MS)
  try {
    const response = await fetch(url, { signal: either, credentials: 'same-origin' })
    if (!response.ok) throw await refusal(response)
    const reader = response.body!.getReader()
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(timer)
      timer = setTimeout(() => silence.abort(), SILENCE_MS)
      contact.at = Date.now()
      yield part.value
    }
  } finally {
    clearTimeout(timer)
  }
}

export const session = {
  /** Return the session, or null without one: status 204. The browser would log a status of 4xx as an error. */
  describe: async (signal?: AbortSignal): Promise<Session | null> => {
    const response = await send('GET', '/v1/session', { signal })
    return response.status === 204 ? null : heard((await response.json()) as Session)
  },
  signIn: async (token: string): Promise<Session> =>
    heard((await (await send('POST', '/v1/session', { body: { Token: token } })).json()) as Session),
  signOut: async (): Promise<void> => void (await send('DELETE', '/v1/session')),
}
