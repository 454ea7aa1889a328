/** The command palette: everything that has a name, and every page, by typing. */
import { Modal, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useEffect, useMemo, useState } from 'react'
import { useNavigate } from 'react-router'

import { fleetsQuery, incidentsQuery, jobsQuery, useRole } from '../api/queries'
import { addressesOf } from '../model/jobs'
import { causeWords } from '../model/verdict'

interface Entry {
  label: string
  kind: string
  to: string
}
const MOST = 12

interface Sought {
  typed: string
  /** Enter was pressed: what is chosen is opened; where nothing is found yet, what is found first, as long as answers are on their way. */
  isEntered: boolean
  onType: (text: string) => void
  onEnter: () => void
  onClose: () => void
}

export default function Palette({ typed, isEntered, onType, onEnter, onClose }: Sought) {
  const navigate = useNavigate()
  const [chosen, setChosen] = useState(0)
  const { mayRun } = useRole()
  const lists = [useQuery({ ...jobsQuery, refetchInterval: false }), useQuery({ ...incidentsQuery(), refetchInterval: false }), useQuery({ ...fleetsQuery, refetchInterval: false })] as const
  const [{ data: jobs }, { data: incidents }, { data: fleets }] = lists
  // The answers to this search's own asking: once they are there, what comes later is news, and opens nothing by itself.
  const isLooking = lists.some((list) => list.isFetching && !list.isFetchedAfterMount)
  const addressOf = useMemo(() => addressesOf(jobs ?? []), [jobs])
  const entries = useMemo<Entry[]>(
    () => [
      { label: 'Overview', kind: 'page', to: '/' },
      { label: 'Jobs', kind: 'page', to: '/jobs' },
      { label: 'Queue', kind: 'page', to: '/queue' },
      { label: 'Incidents', kind: 'page', to: '/incidents' },
      { label: 'Fleets', kind: 'page', to: '/fleets' },
      { label: 'Drills', kind: 'page', to: '/drills' },
      ...(mayRun ? [{ label: 'Submit a job', kind: 'page', to: '/submit' }] : []),
      { label: 'Settings', kind: 'page', to: '/settings' },
      ...(jobs ?? []).map((job) => ({ label: job.TrainingJobName, kind: `job, ${job.SecondaryStatus}`, to: `/jobs/${encodeURIComponent(addressOf(job))}` })),
      ...(fleets ?? []).map((fleet) => ({ label: fleet.FleetName, kind: 'fleet', to: `/fleets/${encodeURIComponent(fleet.FleetName)}` })),
      ...(incidents ?? []).toReversed().map((each) => ({ label: each.IncidentId, kind: `incident, ${causeWords(each.Cause)}`, to: `/incidents/${encodeURIComponent(each.IncidentId)}` })),
    ],
    [jobs, incidents, fleets, mayRun, addressOf],
  )
  const wanted = typed.toLowerCase().split(/\s+/).filter(Boolean)
  const found = entries.filter((entry) => wanted.every((word) => `${entry.label} ${entry.kind}`.toLowerCase().includes(word))).slice(0, MOST)
  const index = Math.min(chosen, Math.max(0, found.length - 1))
  const go = (entry: Entry) => {
    onClose()
    void navigate(entry.to)
  }
  useEffect(() => {
    if (!isEntered) return
    const entry = found[index]
    if (entry) go(entry)
    else if (!isLooking) onType(typed) // nothing has that name: this Enter is over
  })
  return (
    <Modal opened onClose={onClose} withCloseButton={false} padding="xs" yOffset="12vh" attributes={{ content: { 'aria-label': 'Search and go to' } }}>
      <TextInput
        aria-label="Search and go to"
        placeholder="A job, an incident, a fleet, a page"
        value={typed}
        data-autofocus
        role="combobox"
        aria-expanded="true"
        aria-controls="palette"
        aria-activedescendant={found.length ? `palette-${index}` : undefined}
        onChange={(event) => {
          onType(event.currentTarget.value)
          setChosen(0)
        }}
        onKeyDown={(event) => {
          const move = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0
          if (move) {
            event.preventDefault()
            setChosen((index + move + found.length) % Math.max(1, found.length))
          } else if (event.key === 'Enter') {
            event.preventDefault() // what has the focus once this is closed would take the key for its own
            onEnter()
          }
        }}
      />
      <ul className="palette" id="palette" role="listbox" aria-label="Found">
        {found.map((entry, each) => (
          <li key={entry.to} id={`palette-${each}`} role="option" aria-selected={each === index} onClick={() => go(entry)} onPointerMove={() => setChosen(each)}>
            <span>{entry.label}</span>
            <span className="dim">{entry.kind}</span>
          </li>
        ))}
      </ul>
      <p className="dim" role="status">
        {found.length ? null : isLooking ? 'Still looking…' : lists.every((list) => list.data) ? 'Nothing has this in its name.' : 'Nothing was found, but not everything could be asked.'}
      </p>
    </Modal>
  )
}
