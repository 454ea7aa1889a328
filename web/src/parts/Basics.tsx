/** The small parts that every page is made of: status, moments, figures, errors, empty states. */
import { Button, Code, CopyButton, Skeleton, TextInput } from '@mantine/core'
import { useEffect, useRef, useState, useSyncExternalStore, type ReactNode } from 'react'
import { Link } from 'react-router'

import { ApiError, contact, serverTime } from '../api/client'
import { hook, shown, STALE_SECONDS, type AnyFigures, type Field } from '../model/figures'
import { ago, duration, moment } from '../model/format'
import type { Tone } from '../model/standing'
import { PROBLEM } from '../words/shell'

interface IconProps {
  /** SVG path on a grid of 16 pixels. */
  path: string
  size?: number
  strokeWidth?: number
}

export const Icon = ({ path, size = 16, strokeWidth = 1.5 }: IconProps) => (
  <svg
    className="icon"
    width={size}
    height={size}
    viewBox="0 0 16 16"
    aria-hidden="true"
    fill="none"
    stroke="currentColor"
    strokeWidth={strokeWidth}
    strokeLinecap="round"
    strokeLinejoin="round"
  >
    <path d={path} />
  </svg>
)

const PATHS: Record<Tone, string> = {
  good: 'M3 8.5l3.2 3.2L13 4.8',
  busy: 'M13.5 8a5.5 5.5 0 1 1-1.9-4.2M13.5 2v3h-3',
  warn: 'M8 2.2L14.4 13.4H1.6zM8 6.6v3M8 11.4v.2',
  bad: 'M3.8 3.8l8.4 8.4M12.2 3.8l-8.4 8.4',
  idle: 'M3.5 8h9',
}
export const ToneIcon = ({ tone, size }: { tone: Tone; size?: number }) => (
  <Icon path={PATHS[tone]} size={size} strokeWidth={1.9} />
)

/** A sentence whose instance ids are not broken at their hyphen. */
export function Unbroken({ text }: { text: string }) {
  const pieces = text.split(/(\bi-[0-9a-f]{8,17}\b|\b[a-z]{2}(?:-[a-z]+)+-\d[a-z]\b)/)
  const kind = (piece: string) => (piece.startsWith('i-') ? 'id' : 'nowrap')
  return pieces.map((piece, index) =>
    index % 2 ? (
      <span key={index} className={kind(piece)}>
        {piece}
      </span>
    ) : (
      piece
    ),
  )
}

/** A figure of a job, an incident, a fleet or a node (model/figures.ts). */
export const Value = <F extends AnyFigures>({ of, field }: { of: F; field: Field<F> }) => (
  <span {...hook(of, field)}>{shown(of, field)}</span>
)

/** A state: icon, word and colour, never colour alone. A state that only a newer server knows has no tone. */
export function Status({ tone = 'idle', word, title }: { tone?: Tone; word: string; title?: string }) {
  return (
    <span className={`status tone-${tone}`} title={title}>
      <ToneIcon tone={tone} size={13} />
      {word}
    </span>
  )
}

/** One timer for the whole page, so that all relative times change together, once a second. */
const listeners = new Set<() => void>()
let timer: ReturnType<typeof setInterval> | undefined
function subscribe(listener: () => void): () => void {
  listeners.add(listener)
  timer ??= setInterval(() => {
    for (const each of listeners) each()
  }, 1000)
  return () => {
    listeners.delete(listener)
    if (!listeners.size) {
      clearInterval(timer)
      timer = undefined
    }
  }
}
/** The server's time in Unix seconds, renewed every second. */
export const useNow = (): number => useSyncExternalStore(subscribe, () => Math.floor(serverTime()))

/**
 * Whether the page shows old answers: the newest request had no answer, or no answer arrived for `STALE_SECONDS`.
 *
 * No state may then be green, and actions are off. Renders again only when the result changes.
 */
export const useIsStale = (): boolean =>
  useSyncExternalStore(subscribe, () => contact.isMissed || serverTime() - serverTime(contact.at) > STALE_SECONDS)

/** A text that depends on the time. Its component renders only when the text changes: a page may have 1,000 texts. */
export const useTimeText = (text: (now: number) => string): string =>
  useSyncExternalStore(subscribe, () => text(Math.floor(serverTime())))

/** Shows how long ago a time was. The tooltip has the time in UTC and in the reader's time zone. */
export function Ago({ at }: { at?: number }) {
  const text = useTimeText((now) => (at === undefined ? '–' : ago(at, Math.max(now, at - 0.5))))
  if (at === undefined) return <span className="dim">–</span>
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={moment(at)}>
      {text}
    </time>
  )
}

/** Shows the duration between two times. Without `to`, the end is now. */
export function Lasting({ from, to }: { from?: number; to?: number }) {
  return <>{useTimeText((now) => (from === undefined ? '–' : duration((to ?? now) - from)))}</>
}

/**
 * A failed request: its message, code and request id, and a button that repeats it.
 *
 * If the object of a page does not exist, the page has no head. The problem then contains the page's heading.
 */
export function Problem({ error, retry, title }: { error: unknown; retry?: () => void; title?: string }) {
  const known = error instanceof ApiError ? error : undefined
  const message = known?.message ?? (error instanceof Error ? error.message : String(error))
  const isMissing = known?.status === 404 && title === undefined
  const Heading = isMissing ? 'h1' : 'h2'
  return (
    <section className="card problem tone-bad" role="alert">
      <Heading>
        <ToneIcon tone="bad" /> {title ?? (isMissing ? PROBLEM.notFound : PROBLEM.title)}
      </Heading>
      <p>{message}</p>
      {known?.hint && <p>{known.hint}</p>}
      {known && known.fields.length > 0 && (
        <ul>
          {known.fields.map((field) => (
            <li key={field.Field}>
              <code>{field.Field}</code> {field.Message}
            </li>
          ))}
        </ul>
      )}
      <p className="dim">
        {known && <>Code {known.code}</>}
        {known?.requestId && (
          <>
            , request <code>{known.requestId}</code>
          </>
        )}
      </p>
      {retry && (
        <Button size="xs" variant="default" onClick={retry}>
          Try again
        </Button>
      )}
    </section>
  )
}

/** An empty page or card: states what is missing, and the command that creates the first item. */
export function Empty({ title, text, command }: { title: string; text?: string; command?: string }) {
  return (
    <section className="card empty">
      <h2>{title}</h2>
      {text && <p>{text}</p>}
      {command && <Command text={command} />}
    </section>
  )
}

export function Command({ text }: { text: string }) {
  return (
    <div className="command">
      <Code block tabIndex={0}>
        {text}
      </Code>
      <CopyButton value={text}>
        {({ copied, copy }) => (
          <Button size="xs" variant="default" onClick={copy}>
            {copied ? 'Copied' : 'Copy'}
          </Button>
        )}
      </CopyButton>
    </div>
  )
}

export function Loading({ rows = 5 }: { rows?: number }) {
  return (
    <div className="stack" role="status" aria-busy="true" aria-label="Loading">
      {Array.from({ length: rows }, (_, index) => (
        <Skeleton key={index} height={28} radius="sm" />
      ))}
    </div>
  )
}

interface ShownProps<T> {
  query: { data: T | undefined; error: unknown; refetch: () => unknown }
  /** Rows of the skeleton. */
  rows?: number
  /** Takes the place of an empty list. */
  empty?: ReactNode
  children: (data: T) => ReactNode
}

/** A query: its skeleton, its error, or its data. After a failed refresh, the old data stays, with the error above. */
export function Shown<T>({ query, rows, empty, children }: ShownProps<T>) {
  const retry = () => void query.refetch()
  if (query.data !== undefined) {
    const isEmpty = empty !== undefined && Array.isArray(query.data) && !query.data.length
    return (
      <>
        {query.error ? <Problem error={query.error} title="What follows is not renewed" retry={retry} /> : null}
        {isEmpty ? empty : children(query.data)}
      </>
    )
  }
  if (query.error) return <Problem error={query.error} retry={retry} />
  return <Loading rows={rows} />
}

/** A link to a section of the runbook, which the server serves. It opens in a new tab. */
export const RunbookLink = ({ section }: { section: string }) => (
  <a href={`/runbook.html#${encodeURIComponent(section)}`} target="_blank" rel="noreferrer">
    The runbook about this
  </a>
)

/** A link to a job. `address`: the job's name or RunId (`api/addresses`). */
export const JobLink = ({ name, address = name }: { name: string; address?: string }) => (
  <Link to={`/jobs/${encodeURIComponent(address)}`}>{name}</Link>
)
export const FleetLink = ({ name }: { name: string }) => <Link to={`/fleets/${encodeURIComponent(name)}`}>{name}</Link>
export const IncidentLink = ({ id, children = id, className }: IncidentLinkProps) => (
  <Link className={className} to={`/incidents/${encodeURIComponent(id)}`}>
    {children}
  </Link>
)
interface IncidentLinkProps {
  id: string
  children?: ReactNode
  className?: string
}
export const NodeLink = ({ id, fleet }: { id: string; fleet?: string }) =>
  fleet ? (
    <Link className="mono" to={`/fleets/${encodeURIComponent(fleet)}#${id}`}>
      {id}
    </Link>
  ) : (
    <span className="mono">{id}</span>
  )

interface FormProps {
  className: string
  onSubmit: () => void
  children: ReactNode
}

/** A form whose submission, by Enter or by its button, opens no other page. */
export const Form = ({ className, onSubmit, children }: FormProps) => (
  <form
    className={className}
    onSubmit={(event) => {
      event.preventDefault()
      onSubmit()
    }}
  >
    {children}
  </form>
)

interface FilterProps {
  label: string
  placeholder: string
  value: string
  onChange: (value: string) => void
}

/** A filter whose value is in the page's URL. The field keeps its own text, because the URL changes a moment later. */
export function Filter({ label, placeholder, value, onChange }: FilterProps) {
  const [typed, setTyped] = useState(value)
  const input = useRef<HTMLInputElement>(null)
  useEffect(() => {
    // Without the focus, the field did not cause the change: the back button or a link has changed the URL.
    if (document.activeElement !== input.current) setTyped(value)
  }, [value])
  return (
    <TextInput
      data-filter
      ref={input}
      aria-label={label}
      placeholder={placeholder}
      value={typed}
      onChange={(event) => {
        setTyped(event.currentTarget.value)
        onChange(event.currentTarget.value)
      }}
    />
  )
}

/**
 * A name, a value, the attributes of the value's element, such as those of `hook`, and a note.
 *
 * The note says in a few words what the value means.
 */
export type Fact = [string, ReactNode, Record<`data-${string}`, string>?, string?]

export function FactList({ facts }: { facts: Fact[] }) {
  return (
    <dl className="facts">
      {facts.map(([name, value, attributes, note]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd {...attributes}>{value}</dd>
          {note && <dd className="note">{note}</dd>}
        </div>
      ))}
    </dl>
  )
}
