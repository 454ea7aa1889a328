/** What the ranks print: merged or of one, followed as it comes, searched, and linked to line by line. */
import { Button, Checkbox, NativeSelect } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useVirtualizer } from '@tanstack/react-virtual'
import { useEffect, useLayoutEffect, useMemo, useRef, useState, useSyncExternalStore } from 'react'
import { useSearchParams } from 'react-router'

import { LogSource, type Filter as Wanted, type LogState } from '../api/logs'
import { useJobAddress } from '../api/addresses'
import { incidentsQuery } from '../api/queries'
import { whileSeen } from '../api/seen'
import type { Incident, TrainingJob } from '../contract'
import { marked } from '../model/ansi'
import { count, plural } from '../model/format'
import { asText, failureLine, hitOf, hits, lineAt, look, MOST_LINES, placeOf, readPlace, tellsOfFailure, type Line } from '../model/logs'
import { isOver } from '../model/verdict'
import { Empty, Filter, Problem, Shown, Status } from '../parts/Basics'
import { download } from '../parts/download'

const ROW = 20
/** From so near to an end on, the next page is asked for. */
const NEAR = 30
/** So few may not fill the box: there is nothing to scroll to, and what a filter lets through may lie far back. */
const FEW = 100
const EMPTY: LogState = { lines: [], hasOlder: false, isAtEnd: false, isLive: false, isOver: false, isBusy: true }

/** The log of a job from where `from` says, for as long as the filter is the same. */
function useLog(job: string, filter: Wanted, ms: number | undefined): [LogState, LogSource | undefined, () => void] {
  const [tries, setTries] = useState(0)
  const [source, setSource] = useState<LogSource>()
  const { Rank, Generation, FilterPattern } = filter
  useEffect(() => {
    const made = new LogSource(job, { Rank, Generation, FilterPattern })
    setSource(made)
    let stop: (() => void) | undefined
    let isLeft = false
    void made.start(ms === undefined ? { at: 'end' } : { at: 'time', ms }).then(() => {
      if (ms === undefined && !isLeft) stop = whileSeen(() => made.follow(), () => made.pause())
    })
    return () => {
      isLeft = true
      stop?.()
      made.close()
    }
  }, [job, Rank, Generation, FilterPattern, ms, tries])
  const state = useSyncExternalStore(source?.subscribe ?? (() => () => undefined), source?.snapshot ?? (() => EMPTY))
  return [state, source, () => setTries((before) => before + 1)]
}

export default function LogsTab({ job }: { job: TrainingJob }) {
  const [search] = useSearchParams()
  const incidents = useQuery(incidentsQuery(useJobAddress(job)))
  const wanted = search.get('failure')
  if (job.Generation < 1) return <Empty title="No log yet">Ranks print once they have been started; this job has not been launched.</Empty>
  if (!wanted) return <Viewer job={job} incidents={incidents.data} />
  return <Shown query={incidents}>{(all) => <Viewer job={job} incidents={all} failure={all.find((each) => each.IncidentId === wanted)} />}</Shown>
}

const numberOf = (text: string | null): number | undefined => (text && /^\d{1,9}$/.test(text) ? Number(text) : undefined)

function Viewer({ job, incidents, failure }: { job: TrainingJob; incidents?: Incident[]; failure?: Incident }) {
  const [search, setSearch] = useSearchParams()
  const name = useJobAddress(job)
  const rank = numberOf(search.get('rank'))
  const launch = numberOf(search.get('launch'))
  const find = search.get('q') ?? ''
  const isNarrow = search.get('only') === '1' && find !== ''
  const place = readPlace(search.get('at') ?? '')
  const [isWrapped, setWrapped] = useState(false)
  const [chosen, setChosen] = useState<number>()
  const from = place?.at ?? (failure ? failure.FailedAt * 1000 : undefined)
  const [state, source, again] = useLog(name, { Rank: rank, Generation: launch, FilterPattern: isNarrow ? find : undefined }, from)
  const { lines } = state
  const set = (changes: Record<string, string | undefined>) => {
    const next = new URLSearchParams(search)
    for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key)
    setSearch(next, { replace: true, preventScrollReset: true })
  }
  const target = useMemo(() => (place ? lineAt(place, lines) : failure ? failureLine(failure, lines) : undefined), [search.get('at'), failure, lines])
  const found = useMemo(() => (isNarrow ? [] : hits(lines, find)), [find, isNarrow, lines])
  const hit = hitOf(found, chosen)
  useEffect(() => setChosen(hit), [hit])
  const newest = (incidents ?? []).filter((each) => each.RunId === job.RunId).at(-1)
  const nth = found.findIndex((number) => number === hit)
  const go = (by: number) => setChosen(found[(nth + by + found.length) % Math.max(1, found.length)])
  const isFollowing = state.isLive || (source !== undefined && from === undefined && !state.isOver)
  return (
    <section className="card stack">
      <div className="row">
        <NativeSelect
          aria-label="Rank"
          value={rank ?? ''}
          onChange={(event) => set({ rank: event.currentTarget.value, at: undefined })}
          data={[{ value: '', label: 'All ranks, merged' }, ...Array.from({ length: job.NodeCount * job.RanksPerNode }, (_, each) => ({ value: String(each), label: `Rank ${each}` }))]}
        />
        <NativeSelect
          aria-label="Launch"
          value={launch ?? ''}
          onChange={(event) => set({ launch: event.currentTarget.value, at: undefined, failure: undefined })}
          data={[{ value: '', label: 'All launches' }, ...Array.from({ length: job.Generation }, (_, each) => ({ value: String(job.Generation - each), label: `Launch ${job.Generation - each}` }))]}
        />
        <Filter label="Find in the log" placeholder="Find  ( / )" value={find} onChange={(value) => set({ q: value })} />
        {find && !isNarrow && (
          <span className="row" role="group" aria-label="Found lines">
            <span className="dim">{found.length ? `${count(nth + 1)} of ${count(found.length)}` : 'not in the lines that are held'}</span>
            <Button size="compact-xs" variant="default" disabled={!found.length} onClick={() => go(-1)}>
              Previous
            </Button>
            <Button size="compact-xs" variant="default" disabled={!found.length} onClick={() => go(1)}>
              Next
            </Button>
          </span>
        )}
        <Checkbox label="Only these, in the whole log" checked={isNarrow} disabled={!find} onChange={(event) => set({ only: event.currentTarget.checked ? '1' : undefined })} />
        <Checkbox label="Wrap" checked={isWrapped} onChange={(event) => setWrapped(event.currentTarget.checked)} />
      </div>
      <div className="row between">
        <div className="row">
          <Status tone={state.isLive ? 'good' : state.isOver ? 'idle' : isFollowing ? 'warn' : 'idle'} word={state.isLive ? 'Following' : state.isOver ? 'Complete' : isFollowing ? 'Connecting' : 'Not following'} title={state.isLive ? 'Lines come as they are printed' : state.isOver ? 'The job has ended, and every line is here' : 'Lines that are printed now are not shown'} />
          {from !== undefined && !state.isOver && (
            <Button size="compact-xs" variant="default" onClick={() => set({ at: undefined, failure: undefined })}>
              To the newest
            </Button>
          )}
          {newest && failure?.IncidentId !== newest.IncidentId && (
            <Button size="compact-xs" variant="default" onClick={() => set({ failure: newest.IncidentId, at: undefined, launch: undefined, rank: undefined, q: undefined, only: undefined })}>
              To the failure
            </Button>
          )}
          {failure && <span className="dim">Where incident {failure.IncidentId} failed.</span>}
        </div>
        <div className="row">
          <span className="dim">
            {plural(lines.length, 'line')} held{lines.length >= MOST_LINES ? ', as many as a page holds' : ''}
          </span>
          <Button size="compact-xs" variant="default" disabled={!lines.length} onClick={() => download(`${name}.log`, lines.map(asText))}>
            Download these
          </Button>
        </div>
      </div>
      {state.error !== undefined && <Problem error={state.error} title="The log is not read on" retry={again} />}
      {lines.length || state.isBusy ? (
        <Lines
          key={`${search.get('at')} ${failure?.IncidentId} ${rank} ${launch} ${isNarrow}`}
          state={state}
          source={source}
          target={target}
          hit={hit}
          find={find}
          isWrapped={isWrapped}
          isMerged={rank === undefined}
          onPlace={(line) => set({ at: placeOf(line, lines), failure: undefined, q: undefined, only: undefined })}
        />
      ) : state.hasOlder || !state.isAtEnd ? (
        <p className="dim">Nothing is found in what was looked at so far.</p>
      ) : (
        <p className="dim">{isNarrow ? 'No line has this in it.' : isOver(job) ? 'Nothing was printed.' : 'Nothing has been printed yet.'}</p>
      )}
      {!state.isBusy && state.error === undefined && lines.length < (isNarrow || rank !== undefined ? FEW : 1) && (
        <div className="row">
          {state.hasOlder && (
            <Button size="compact-xs" variant="default" onClick={() => void source?.older()}>
              Look further back
            </Button>
          )}
          {!state.isAtEnd && (
            <Button size="compact-xs" variant="default" onClick={() => void source?.newer()}>
              Look further on
            </Button>
          )}
        </div>
      )}
      <p className="dim">
        A click on a time puts the line into the address. The same in a terminal: <code>everstep jobs logs {name}</code>.
      </p>
    </section>
  )
}

interface Shows {
  state: LogState
  source?: LogSource
  target?: Line
  /** The number of the line that was found and is looked at. */
  hit?: number
  find: string
  isWrapped: boolean
  isMerged: boolean
  onPlace: (line: Line) => void
}

function Lines({ state, source, target, hit, find, isWrapped, isMerged, onPlace }: Shows) {
  const { lines } = state
  const box = useRef<HTMLDivElement>(null)
  const [isPinned, setPinned] = useState(target === undefined)
  const first = lines[0]?.number ?? 0
  const before = useRef(first)
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => box.current,
    estimateSize: () => ROW,
    getItemKey: (index) => lines[index]?.number ?? index,
    overscan: 20,
  })
  useEffect(() => virtual.measure(), [isWrapped, virtual])
  useLayoutEffect(() => {
    const more = before.current - first
    before.current = first
    // What was read stays where it is, also where the virtualizer is still on its way to a line: by its index that is another one now.
    if (more > 0 && box.current && !isPinned) virtual.scrollToOffset(box.current.scrollTop + more * ROW)
  }, [first, isPinned, virtual])
  const looked = hit ?? target?.number
  const index = looked === undefined ? undefined : looked - first
  useEffect(() => {
    if (index === undefined) return
    setPinned(false)
    virtual.scrollToIndex(index, { align: 'center' })
    if (hit === undefined) box.current?.scrollIntoView({ block: 'nearest' }) // a link leads to the line, not to the top of the job's page
  }, [looked, virtual])
  const last = lines.at(-1)?.number
  useLayoutEffect(() => {
    if (isPinned && lines.length) virtual.scrollToIndex(lines.length - 1, { align: 'end' })
  }, [last, isPinned, virtual])
  const items = virtual.getVirtualItems()
  const top = items[0]?.index ?? 0
  const bottom = items.at(-1)?.index ?? 0
  useEffect(() => {
    if (!lines.length || state.isBusy || state.error !== undefined) return // what was refused is asked for again by a person
    if (!isPinned && box.current!.scrollTop < NEAR * ROW) void source?.older() // by where it stands: what is drawn may be behind
    if (bottom >= lines.length - NEAR) void source?.newer()
  }, [top, bottom, lines.length, state.isBusy, state.error, isPinned, source])
  return (
    <div className="logbox">
      <div
        ref={box}
        className={isWrapped ? 'log wrap' : 'log'}
        role="log"
        aria-live="off"
        aria-label="Lines of the log"
        tabIndex={0}
        onScroll={(event) => {
          const { scrollHeight, scrollTop, clientHeight } = event.currentTarget
          setPinned(scrollHeight - scrollTop - clientHeight < ROW)
        }}
      >
        <div style={{ height: virtual.getTotalSize(), position: 'relative' }}>
          {items.map((item) => {
            const line = lines[item.index]!
            return (
              <div
                key={item.key}
                ref={isWrapped ? virtual.measureElement : undefined}
                data-index={item.index}
                className={`line ${line.stream} ${tellsOfFailure(line) ? 'bad' : ''} ${item.index === index ? 'here' : ''}`}
                style={{ transform: `translateY(${item.start}px)` }}
              >
                <button type="button" className="when" title={`${new Date(line.at).toISOString()}, ${line.nodeId}`} onClick={() => onPlace(line)}>
                  {new Date(line.at).toISOString().slice(11, 23)}
                </button>
                {isMerged && <span className="who">{line.rank === undefined ? 'node' : `r${line.rank}`}</span>}
                <span className="what">
                  {marked(look(line), find).map((piece, each) =>
                    piece.isMarked ? (
                      <mark key={each}>{piece.text}</mark>
                    ) : (
                      <span key={each} className={piece.look || undefined}>
                        {piece.text}
                      </span>
                    ),
                  )}
                </span>
              </div>
            )
          })}
        </div>
      </div>
      {!isPinned && state.isLive && (
        <Button className="tolast" size="compact-xs" onClick={() => setPinned(true)}>
          ↓ New lines
        </Button>
      )}
    </div>
  )
}
