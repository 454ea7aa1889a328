/**
 * Reads a job's log: pages of older and newer lines from a starting point, and new lines as the ranks print them.
 *
 * Every line is read once, because each request for a page or the stream continues from the server's last token.
 */
import type { GetLogEventsResponse, LogEvent, LogEvents, Operations } from '../contract'
import { EventStreamDecoder } from '../model/eventStream'
import { appended, MOST_LINES, prepended, type Line } from '../model/logs'
import { address, ApiError, call, open } from './client'

type Asked = Operations['GetLogEvents']['request']
export type Filter = Pick<Asked, 'Rank' | 'Generation' | 'FilterPattern'>
export type Start = { at: 'end' } | { at: 'time'; ms: number }

export interface LogState {
  lines: Line[]
  /** Whether the log has lines that are older than `lines`. */
  hasOlder: boolean
  /** Whether `lines` contains the newest line of the log. */
  isAtEnd: boolean
  /** Whether new lines arrive through an open stream. */
  isLive: boolean
  /** Whether the job has ended, so that no further lines follow. */
  isOver: boolean
  isBusy: boolean
  error?: unknown
}

/** The state before the first answer. */
export const UNREAD: LogState = {
  lines: [],
  hasOlder: false,
  isAtEnd: false,
  isLive: false,
  isOver: false,
  isBusy: true,
}

/** The requests that a `LogSource` makes. Tests replace them. */
export interface LogService {
  page: (request: Asked, signal: AbortSignal) => Promise<GetLogEventsResponse>
  /** Resolves when the log has ended. Rejects if the connection breaks. */
  follow: (
    request: Operations['FollowLogs']['request'],
    take: (batch: LogEvents) => void,
    signal: AbortSignal,
  ) => Promise<void>
  wait: (ms: number, signal: AbortSignal) => Promise<void>
}

const PAGE = 1_000
/** Maximum number of empty pages that one call reads. A page is empty if no line of it matches the filter. */
const MOST_EMPTY = 20
const AROUND_MS = 5_000
const AGAIN_MS = 2_000

/** Convert to seconds, plus half a millisecond: the server truncates, so a rounding error could cost a millisecond. */
const seconds = (ms: number): number => (ms + 0.5) / 1000

export const service: LogService = {
  page: (request, signal) => call('GetLogEvents', request, signal),
  follow: async (request, take, signal) => {
    const decoder = new EventStreamDecoder()
    for await (const bytes of open(address('FollowLogs', request).url, signal)) {
      for (const { type, payload } of decoder.push(bytes)) {
        if (type === 'LogEvents') take(JSON.parse(payload) as LogEvents)
      }
    }
  },
  wait: (ms, signal) =>
    new Promise((resolve) => {
      const timer = setTimeout(resolve, ms)
      signal.addEventListener('abort', () => {
        clearTimeout(timer)
        resolve()
      })
    }),
}

type Reading = Pick<Asked, 'NextToken' | 'StartTime' | 'EndTime' | 'StartFromHead'>

export class LogSource {
  private state = UNREAD
  private readonly listeners = new Set<() => void>()
  private readonly closed = new AbortController()
  private following?: AbortController
  /** Parameters of the request for the next page of older lines. */
  private back: Reading = {}
  private forward?: string

  constructor(
    private readonly job: string,
    private readonly filter: Filter,
    private readonly ask: LogService = service,
  ) {}

  readonly snapshot = (): LogState => this.state
  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener)
    return () => this.listeners.delete(listener)
  }

  /** Read the first lines: the newest lines of the log, or the lines around a time. */
  async start(from: Start): Promise<void> {
    await this.busily(async () => {
      if (from.at === 'end') {
        const before = await this.nearest('NextBackwardToken', {})
        this.back = before.reading
        this.forward = before.first.NextForwardToken
        this.set({ lines: appended([], before.events).lines, hasOlder: !before.isAll, isAtEnd: true })
        return
      }
      const StartTime = seconds(Math.max(0, from.ms - AROUND_MS))
      const [before, after] = await Promise.all([
        this.nearest('NextBackwardToken', { EndTime: StartTime }, PAGE / 2),
        this.nearest('NextForwardToken', { StartTime, StartFromHead: true }),
      ])
      this.back = before.reading
      this.forward = after.reading.NextToken
      const { lines } = appended(appended([], before.events).lines, after.events)
      this.set({ lines, hasOlder: !before.isAll, isAtEnd: after.isAll })
    })
  }

  /** Read a page of older lines. */
  async older(): Promise<void> {
    if (this.state.isBusy || !this.state.hasOlder || this.state.lines.length >= MOST_LINES) return
    await this.busily(async () => {
      const asked = this.back
      const { events, reading, isAll } = await this.nearest('NextBackwardToken', asked)
      if (this.back !== asked) return // the oldest lines were dropped meanwhile, so these lines are not adjacent
      this.back = reading
      this.set({ lines: prepended(this.state.lines, events), hasOlder: !isAll })
    })
  }

  /** Read a page of newer lines. If the log has none, `isAtEnd` becomes true. */
  async newer(): Promise<void> {
    if (this.state.isBusy || this.state.isAtEnd || this.forward === undefined) return
    await this.busily(async () => {
      const { events, reading, isAll } = await this.nearest('NextForwardToken', { NextToken: this.forward })
      this.forward = reading.NextToken
      this.take(events, { isAtEnd: isAll })
    })
  }

  /** Receive lines as they are printed, beginning after the newest held line, until `pause`. */
  follow(): void {
    if (this.following || this.state.isOver) return
    this.following = new AbortController()
    void this.keepFollowing(AbortSignal.any([this.following.signal, this.closed.signal]))
  }

  pause(): void {
    this.following?.abort()
    this.following = undefined
    this.set({ isLive: false })
  }

  close(): void {
    this.closed.abort()
    this.listeners.clear()
  }

  private async keepFollowing(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      try {
        await this.ask.follow(
          { TrainingJobName: this.job, ...this.filter, NextToken: this.forward },
          (batch) => {
            if (signal.aborted) return
            this.forward = batch.NextForwardToken
            this.take(batch.Events ?? [], { isLive: true, isAtEnd: true, error: undefined })
          },
          signal,
        )
        if (!signal.aborted) this.set({ isLive: false, isOver: true })
        return
      } catch (error) {
        if (signal.aborted) return
        const isPermanent = error instanceof ApiError && !error.isPassing
        this.set({ isLive: false, error: isPermanent ? error : undefined })
        if (isPermanent) return this.pause()
        await this.ask.wait(AGAIN_MS, signal)
      }
    }
  }

  private take(events: LogEvents['Events'], more: Partial<LogState>): void {
    const { lines, isCut } = appended(this.state.lines, events)
    // The token for older lines belongs to lines that `appended` has dropped. Request the next page by time instead.
    if (isCut) this.back = { EndTime: seconds(lines[0]!.at) }
    this.set({ lines, ...more, ...(isCut ? { hasOlder: true } : {}) })
  }

  /**
   * Read pages in one direction until one has lines, the log ends, or `MOST_EMPTY` pages were empty.
   *
   * Each request repeats the first request's StartTime and EndTime, because a token is valid only with these times.
   */
  private async nearest(
    way: 'NextBackwardToken' | 'NextForwardToken',
    asked: Reading,
    Limit = PAGE,
  ): Promise<{ first: GetLogEventsResponse; events: LogEvent[]; reading: Reading; isAll: boolean }> {
    let reading = asked
    let first: GetLogEventsResponse | undefined
    for (let tries = 1; ; tries += 1) {
      const page = await this.page({ ...reading, Limit })
      const events = page.Events ?? []
      const isAll = page[way] === reading.NextToken
      first ??= page
      reading = { ...reading, NextToken: page[way] }
      if (events.length || isAll || tries >= MOST_EMPTY) return { first, events, reading, isAll }
    }
  }

  private page(request: Omit<Asked, 'TrainingJobName'>): Promise<GetLogEventsResponse> {
    return this.ask.page({ TrainingJobName: this.job, ...this.filter, ...request }, this.closed.signal)
  }

  private async busily(what: () => Promise<void>): Promise<void> {
    this.set({ isBusy: true, error: undefined })
    try {
      await what()
    } catch (error) {
      if (!this.closed.signal.aborted) this.set({ error })
    } finally {
      this.set({ isBusy: false })
    }
  }

  private set(changes: Partial<LogState>): void {
    this.state = { ...this.state, ...changes }
    for (const listener of this.listeners) listener()
  }
}
